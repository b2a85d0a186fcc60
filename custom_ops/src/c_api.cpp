// The C interface: exceptions end here.
#include <cstring>
#include <vector>

#include "isa.h"
#include "op.h"

using namespace gr;

namespace {

const char* kind_name(std::int32_t kind) {
    return kind == GR_ATTRIBUTE_INT     ? "an integer"
           : kind == GR_ATTRIBUTE_FLOAT ? "a float"
           : kind == GR_ATTRIBUTE_TEXT  ? "a string"
                                        : "of unknown kind";
}

// The attributes of a call.
class GivenAttributes : public AttributeSource {
public:
    GivenAttributes(const GrAttribute* attributes, std::size_t count) : attributes_(attributes), count_(count) {}

    bool read(const char* op, const char* name, std::int64_t& value) const override {
        const GrAttribute* found = find(op, name, GR_ATTRIBUTE_INT);
        if (found != nullptr)
            value = found->integer;
        return found != nullptr;
    }
    bool read(const char* op, const char* name, float& value) const override {
        const GrAttribute* found = find(op, name, GR_ATTRIBUTE_FLOAT);
        if (found != nullptr)
            value = found->number;
        return found != nullptr;
    }
    bool read(const char* op, const char* name, std::string& value) const override {
        const GrAttribute* found = find(op, name, GR_ATTRIBUTE_TEXT);
        if (found != nullptr)
            value = found->text != nullptr ? found->text : "";
        return found != nullptr;
    }

    void require_known(const Operator& op) const {
        for (std::size_t k = 0; k < count_; ++k) {
            bool known = false;
            for (const AttributeDeclaration& attribute : op.attributes)
                known = known || std::strcmp(attribute.name, attributes_[k].name) == 0;
            if (!known)
                fail(op.name, "there is no attribute ", attributes_[k].name);
        }
    }

private:
    const GrAttribute* find(const char* op, const char* name, std::int32_t kind) const {
        for (std::size_t k = 0; k < count_; ++k) {
            if (std::strcmp(attributes_[k].name, name) != 0)
                continue;
            if (attributes_[k].kind != kind)
                fail(op, "attribute ", name, " is ", kind_name(attributes_[k].kind), ", expected ", kind_name(kind));
            return attributes_ + k;
        }
        return nullptr;
    }

    const GrAttribute* attributes_;
    std::size_t count_;
};

// The tensors of a call, one for each that is declared.
std::vector<const GrTensor*> complete(const Operator& op, const char* what,
                                      const std::vector<TensorDeclaration>& declared, const GrTensor* const* given,
                                      std::size_t count) {
    if (count > declared.size())
        fail(op.name, static_cast<std::int64_t>(count), " ", what, " are given, and there are ",
             static_cast<std::int64_t>(declared.size()));
    std::vector<const GrTensor*> tensors(given, given + count);
    tensors.resize(declared.size());
    for (std::size_t k = 0; k < declared.size(); ++k)
        if (tensors[k] == nullptr && !declared[k].traits.optional)
            fail(op.name, declared[k].name, " is missing");
    return tensors;
}

} // namespace

const char* gr_version() {
    return GRAPHREWRITE_VERSION;
}

const char* gr_operators() {
    return operators_as_json().c_str();
}

const char* gr_isa() {
    try {
        return active_kernels("gr_isa").name;
    } catch (const std::exception&) {
        return nullptr;
    }
}

std::int32_t gr_set_isa(const char* name, char* error, std::size_t error_size) {
    return guarded("gr_set_isa", error, error_size, [&] { select_isa("gr_set_isa", name); });
}

std::int32_t gr_run(const char* op, const GrTensor* const* inputs, std::size_t input_count,
                    const GrTensor* const* outputs, std::size_t output_count, const GrAttribute* attributes,
                    std::size_t attribute_count, const GrThreads* threads, char* error, std::size_t error_size) {
    return guarded(op, error, error_size, [&] {
        const Operator& known = operator_named(op);
        const GivenAttributes source(attributes, attribute_count);
        source.require_known(known);
        const auto bound = known.bind(source);
        const auto all_inputs = complete(known, "inputs", known.inputs, inputs, input_count);
        const auto all_outputs = complete(known, "outputs", known.outputs, outputs, output_count);
        bound->run({known.name, Threads(threads)}, all_inputs.data(), all_outputs.data());
    });
}
