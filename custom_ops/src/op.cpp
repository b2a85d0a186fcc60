#include "op.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "tensor.h"

namespace gr {
namespace {

// Filled while the library is loaded, one operator by each file that declares one.
std::vector<const Operator*>& registry() {
    static auto& operators = *new std::vector<const Operator*>; // never destroyed: a runtime may outlive static objects
    return operators;
}

// "a[B,S], b" to names and shapes.
void name_tensors(std::vector<TensorDeclaration>& tensors, const char* text, const char* end) {
    for (TensorDeclaration& tensor : tensors) {
        while (text != end && (*text == ' ' || *text == ','))
            ++text;
        const char* const name_end = std::find_if(text, end, [](char c) { return c == ',' || c == ' ' || c == '['; });
        tensor.name.assign(text, name_end);
        text = name_end;
        if (text != end && *text == '[') {
            const char* const shape_end = std::find(text, end, ']') + 1;
            tensor.shape.assign(text, shape_end);
            text = shape_end;
        }
    }
}

std::string list(const std::vector<std::string>& items) {
    std::string text = "[";
    for (const std::string& item : items)
        text += (text.size() > 1 ? "," : "") + item;
    return text + "]";
}

std::string field(const char* name, const std::string& json) {
    return json_text(std::string(name)) + ":" + json;
}

std::string tensor_json(const TensorDeclaration& tensor) {
    const Traits& traits = tensor.traits;
    std::vector<std::string> dtypes;
    for (std::size_t k = 0; k < traits.types.count; ++k)
        dtypes.push_back(json_text(std::string(dtype_name(traits.types.dtypes[k]))));
    std::string text =
        "{" + field("name", json_text(tensor.name)) + "," + field("shape", json_text(tensor.shape)) + "," +
        field("dtypes", list(dtypes)) + "," +
        field("variable", traits.types.variable == nullptr ? "null" : json_text(std::string(traits.types.variable))) +
        "," + field("optional", json_text(traits.optional));
    if (traits.role == Role::Output)
        text += "," + field("like", json_text(std::int64_t{traits.like})) + "," +
                field("per_row", json_text(traits.per_row)) + "," + field("in_place", json_text(traits.in_place));
    return text + "}";
}

std::string attribute_json(const AttributeDeclaration& attribute) {
    return "{" + field("name", json_text(std::string(attribute.name))) + "," +
           field("kind", json_text(std::string(attribute.kind))) + "," + field("default", attribute.default_value) +
           "," + field("doc", json_text(std::string(attribute.doc))) + "}";
}

std::string operator_json(const Operator& op) {
    std::vector<std::string> inputs, outputs, attributes;
    for (const TensorDeclaration& tensor : op.inputs)
        inputs.push_back(tensor_json(tensor));
    for (const TensorDeclaration& tensor : op.outputs)
        outputs.push_back(tensor_json(tensor));
    for (const AttributeDeclaration& attribute : op.attributes)
        attributes.push_back(attribute_json(attribute));
    return "{" + field("name", json_text(std::string(op.name))) + "," +
           field("since_version", json_text(std::int64_t{op.since_version})) + "," +
           field("doc", json_text(std::string(op.doc))) + "," + field("inputs", list(inputs)) + "," +
           field("outputs", list(outputs)) + "," + field("attributes", list(attributes)) + "}";
}

} // namespace

const std::vector<const Operator*>& all_operators() {
    return registry();
}

const Operator& operator_named(const char* name) {
    std::string known;
    for (const Operator* op : registry()) {
        if (std::strcmp(op->name, name) == 0)
            return *op;
        known += (known.empty() ? "" : ", ") + std::string(op->name);
    }
    fail(name, "there is no such operator; known are ", known);
}

bool register_operator(Operator* op, const char* signature) {
    const char* const arrow = std::strstr(signature, "->");
    name_tensors(op->inputs, signature, arrow);
    name_tensors(op->outputs, arrow + 2, signature + std::strlen(signature));
    auto& operators = registry();
    const auto place = std::find_if(operators.begin(), operators.end(),
                                    [&](const Operator* other) { return std::strcmp(op->name, other->name) < 0; });
    operators.insert(place, op);
    return true;
}

const std::string& operators_as_json() {
    static const auto& text = *new std::string([] {
        std::vector<std::string> operators;
        for (const Operator* op : registry())
            operators.push_back(operator_json(*op));
        return list(operators);
    }());
    return text;
}

std::string json_text(const std::string& value) {
    std::string text = "\"";
    for (const char c : value) {
        if (c == '"' || c == '\\')
            text += '\\';
        if (c == '\n')
            text += "\\n";
        else
            text += c;
    }
    return text + "\"";
}

std::string json_text(std::int64_t value) {
    return std::to_string(value);
}

std::string json_text(bool value) {
    return value ? "true" : "false";
}

std::string json_text(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
    return text;
}

std::string json_text(const std::optional<float>& value) {
    return value ? json_text(*value) : "null";
}

void read_value(const AttributeSource& source, const char* op, const char* name, std::int64_t& value) {
    source.read(op, name, value);
}

void read_value(const AttributeSource& source, const char* op, const char* name, float& value) {
    source.read(op, name, value);
}

void read_value(const AttributeSource& source, const char* op, const char* name, std::string& value) {
    source.read(op, name, value);
}

void read_value(const AttributeSource& source, const char* op, const char* name, std::optional<float>& value) {
    float number;
    if (source.read(op, name, number))
        value = number;
}

void read_value(const AttributeSource& source, const char* op, const char* name, bool& value) {
    std::int64_t number = value;
    source.read(op, name, number);
    if (number != 0 && number != 1)
        fail(op, name, " is ", number, ", expected 0 or 1");
    value = number == 1;
}

} // namespace gr
