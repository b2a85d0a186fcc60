// Declaration of operators. An operator is a C++ function whose parameter types say what it takes and returns, and one
// GR_OPERATOR line beside it:
//
//     struct E : TypeVariable<float, std::int8_t> { static constexpr const char* name = "E"; };
//
//     void update_cache(const Call& call, Input<E> value, Input<E> cache, Input<std::int64_t> start_pos,
//                       InPlace<E, 1> new_cache, LayoutAttribute layout);
//
//     GR_OPERATOR("UpdateCache", 1, update_cache,
//                 "value[B,S,H,D], cache[B,C,H,D], start_pos -> new_cache[B,C,H,D]", R"(Documentation.)");
//
// From that come the operator of onnxruntime (types, optional inputs, in-place pairs, shapes, attributes, version), the
// operator of the C interface and, through gr_operators(), those of torch, the ONNX schemas and the documentation.
// Inputs come first among the parameters, then outputs, then attributes. The function throws InvalidArgument (see
// error.h) before it writes anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "error.h"
#include "graphrewrite/kernels.h"
#include "ort/abi.h"
#include "threads.h"

namespace gr {

struct Float16 {};
struct BFloat16 {};

template <typename T> constexpr std::int32_t kDtype = 0;
template <> inline constexpr std::int32_t kDtype<float> = GR_FLOAT;
template <> inline constexpr std::int32_t kDtype<std::uint8_t> = GR_UINT8;
template <> inline constexpr std::int32_t kDtype<std::int8_t> = GR_INT8;
template <> inline constexpr std::int32_t kDtype<std::int32_t> = GR_INT32;
template <> inline constexpr std::int32_t kDtype<std::int64_t> = GR_INT64;
template <> inline constexpr std::int32_t kDtype<bool> = GR_BOOL;
template <> inline constexpr std::int32_t kDtype<Float16> = GR_FLOAT16;
template <> inline constexpr std::int32_t kDtype<double> = GR_DOUBLE;
template <> inline constexpr std::int32_t kDtype<BFloat16> = GR_BFLOAT16;

// Element types of which a call has one, the same for every parameter that names the variable. A variable derives from
// this and has a `name`.
template <typename... Types> struct TypeVariable {
    static constexpr std::int32_t dtypes[] = {kDtype<Types>...};
};

// The element types a parameter may have.
struct ElementTypes {
    const char* variable; // NULL: a fixed type
    const std::int32_t* dtypes;
    std::size_t count;
};

template <typename X, typename = void> struct ElementTypesOf {
    static constexpr std::int32_t dtype = kDtype<X>;
    static constexpr ElementTypes value{nullptr, &dtype, 1};
};
template <typename X> struct ElementTypesOf<X, std::void_t<decltype(X::dtypes)>> {
    static constexpr ElementTypes value{X::name, X::dtypes, sizeof(X::dtypes) / sizeof(std::int32_t)};
};

enum class Role { Input, Output, Attribute };

// What a parameter type says of itself.
struct Traits {
    Role role;
    ElementTypes types{};
    bool optional = false;
    int like = -1;         // an output: the input whose shape it has
    bool per_row = false;  // an output: with 1 in the last place of that shape
    bool in_place = false; // an output: may share the buffer of input `like`
};

struct TensorParameter {
    const GrTensor* tensor; // NULL: absent
    operator const GrTensor*() const { return tensor; }
};

template <typename X> struct Input : TensorParameter {
    static constexpr Traits traits{Role::Input, ElementTypesOf<X>::value};
};
template <typename X> struct OptionalInput : TensorParameter {
    static constexpr Traits traits{Role::Input, ElementTypesOf<X>::value, true};
};
// A new tensor with the shape of input `Like`.
template <typename X, int Like> struct Output : TensorParameter {
    static constexpr Traits traits{Role::Output, ElementTypesOf<X>::value, false, Like};
};
// The same with one element in the place of the last dimension.
template <typename X, int Like> struct RowOutput : TensorParameter {
    static constexpr Traits traits{Role::Output, ElementTypesOf<X>::value, false, Like, true};
};
// The new state of input `Of`, in the same buffer where the runtime allows.
template <typename X, int Of> struct InPlace : TensorParameter {
    static constexpr Traits traits{Role::Output, ElementTypesOf<X>::value, false, Of, false, true};
};
template <typename X, int Of> struct OptionalInPlace : TensorParameter {
    static constexpr Traits traits{Role::Output, ElementTypesOf<X>::value, true, Of, false, true};
};

// An attribute type derives from this, has a `name` and a `doc`, sets its default in its constructor when that is not
// zero, and may have `void check(const char* op) const`, which throws.
template <typename Value> struct Attribute {
    static constexpr Traits traits{Role::Attribute};
    Value value{};
};

// Where the values of attributes come from. Each function leaves `value` alone and returns false when the attribute is
// absent, and throws when it has another type.
class AttributeSource {
public:
    virtual ~AttributeSource() = default;
    virtual bool read(const char* op, const char* name, std::int64_t& value) const = 0;
    virtual bool read(const char* op, const char* name, float& value) const = 0;
    virtual bool read(const char* op, const char* name, std::string& value) const = 0;
};

void read_value(const AttributeSource& source, const char* op, const char* name, std::int64_t& value);
void read_value(const AttributeSource& source, const char* op, const char* name, float& value);
void read_value(const AttributeSource& source, const char* op, const char* name, std::string& value);
void read_value(const AttributeSource& source, const char* op, const char* name, std::optional<float>& value);
void read_value(const AttributeSource& source, const char* op, const char* name, bool& value); // an integer, 0 or 1

// The operator that is called, and the threads it may use.
struct Call {
    const char* op;
    const Threads& threads;
};

// An operator with its attributes: what runs.
class BoundOperator {
public:
    virtual ~BoundOperator() = default;
    // As many pointers as the operator declares; NULL: absent.
    virtual void run(const Call& call, const GrTensor* const* inputs, const GrTensor* const* outputs) const = 0;
};

struct TensorDeclaration {
    std::string name, shape; // the shape as it is written, "[B,S,H,D]", or empty
    Traits traits;
};

struct AttributeDeclaration {
    const char* name;
    const char* kind;          // "int", "bool", "float" or "string"
    std::string default_value; // JSON; "null": none
    const char* doc;
};

class Operator {
public:
    virtual ~Operator() = default;
    virtual std::unique_ptr<BoundOperator> bind(const AttributeSource& attributes) const = 0;

    const char* name;
    int since_version;
    const char* doc;
    std::vector<TensorDeclaration> inputs, outputs;
    std::vector<AttributeDeclaration> attributes;
    // OrtCustomOp::GetMayInplace, which is not told the operator it is asked about.
    std::size_t(GR_ORT_CALL* may_inplace)(int** inputs, int** outputs);
};

// All operators, by name.
const std::vector<const Operator*>& all_operators();
// Throws InvalidArgument where there is none of that name.
const Operator& operator_named(const char* name);
// Keeps the operator for the life of the process. Takes names and shapes from `signature`.
bool register_operator(Operator* op, const char* signature);
// All operators as JSON.
const std::string& operators_as_json();

// How many tensors a signature names before and after its arrow.
constexpr std::pair<std::size_t, std::size_t> count_tensors(const char* signature) {
    std::size_t counts[2] = {1, 1}, side = 0;
    int depth = 0;
    for (const char* at = signature; *at != '\0'; ++at) {
        depth += (*at == '[') - (*at == ']');
        counts[side] += depth == 0 && *at == ',';
        if (at[0] == '-' && at[1] == '>')
            side = 1;
    }
    return {counts[0], counts[1]};
}

template <typename Value> constexpr const char* attribute_kind() {
    if constexpr (std::is_same_v<Value, std::string>)
        return "string";
    else if constexpr (std::is_same_v<Value, bool>)
        return "bool";
    else
        return std::is_same_v<Value, std::int64_t> ? "int" : "float";
}

std::string json_text(const std::string& value);
std::string json_text(std::int64_t value);
std::string json_text(bool value);
std::string json_text(float value);
std::string json_text(const std::optional<float>& value);

template <auto Function> class OperatorOf;

template <typename... Parameters, void (*Function)(const Call&, Parameters...)>
class OperatorOf<Function> : public Operator {
    static constexpr Traits kTraits[] = {Parameters::traits...};

    static constexpr std::size_t count(Role role) {
        std::size_t total = 0;
        for (const Traits& traits : kTraits)
            total += traits.role == role;
        return total;
    }

public:
    static constexpr std::size_t kInputs = count(Role::Input), kOutputs = count(Role::Output);

    OperatorOf(const char* name_, int since_version_, const char* doc_) {
        name = name_;
        since_version = since_version_;
        doc = doc_;
        may_inplace = in_place_pairs;
        (declare<Parameters>(), ...);
    }

    std::unique_ptr<BoundOperator> bind(const AttributeSource& source) const override {
        auto bound = std::make_unique<Bound>();
        std::apply([&](auto&... attribute) { (read(source, attribute), ...); }, bound->attributes);
        return bound;
    }

private:
    // A place for every parameter; only those of attributes hold anything.
    template <typename Parameter>
    using Kept = std::conditional_t<Parameter::traits.role == Role::Attribute, Parameter, std::tuple<>>;

    struct Bound : BoundOperator {
        std::tuple<Kept<Parameters>...> attributes;

        void run(const Call& call, const GrTensor* const* inputs, const GrTensor* const* outputs) const override {
            invoke(call, inputs, outputs, std::index_sequence_for<Parameters...>());
        }

        template <std::size_t... Index>
        void invoke(const Call& call, const GrTensor* const* inputs, const GrTensor* const* outputs,
                    std::index_sequence<Index...>) const {
            Function(call, argument<Index>(inputs, outputs)...);
        }

        template <std::size_t Index>
        auto argument(const GrTensor* const* inputs, const GrTensor* const* outputs) const {
            using Parameter = std::tuple_element_t<Index, std::tuple<Parameters...>>;
            if constexpr (Parameter::traits.role == Role::Attribute)
                return std::get<Index>(attributes);
            else
                return Parameter{{Index < kInputs ? inputs[Index] : outputs[Index - kInputs]}};
        }
    };

    template <typename Parameter> void declare() {
        if constexpr (Parameter::traits.role == Role::Attribute) {
            const Parameter standard;
            using Value = decltype(Parameter::value);
            attributes.push_back({Parameter::name, attribute_kind<Value>(), json_text(standard.value), Parameter::doc});
        } else {
            (Parameter::traits.role == Role::Input ? inputs : outputs).push_back({"", "", Parameter::traits});
        }
    }

    template <typename Kind, typename = void> struct Checks : std::false_type {};
    template <typename Kind>
    struct Checks<Kind, std::void_t<decltype(std::declval<const Kind&>().check(""))>> : std::true_type {};

    template <typename Kind> void read(const AttributeSource& source, Kind& attribute) const {
        if constexpr (!std::is_same_v<Kind, std::tuple<>>) {
            read_value(source, name, Kind::name, attribute.value);
            if constexpr (Checks<Kind>::value)
                attribute.check(name);
        }
    }

    // The runtime is given these arrays themselves: nothing is allocated on one side of the library's border and freed
    // on the other.
    struct Pairs {
        int inputs[kOutputs + 1] = {}, outputs[kOutputs + 1] = {};
        std::size_t count = 0;
    };
    static constexpr Pairs make_pairs() {
        Pairs pairs;
        for (std::size_t index = 0; index < kOutputs; ++index)
            if (kTraits[kInputs + index].in_place) {
                pairs.inputs[pairs.count] = kTraits[kInputs + index].like;
                pairs.outputs[pairs.count++] = static_cast<int>(index);
            }
        return pairs;
    }
    static std::size_t GR_ORT_CALL in_place_pairs(int** inputs, int** outputs) {
        static Pairs pairs = make_pairs();
        *inputs = pairs.inputs;
        *outputs = pairs.outputs;
        return pairs.count;
    }
};

} // namespace gr

// Declares an operator: its name, the version of the domain that brought it, its function, the names of its tensors
// with their shapes, and its documentation.
#define GR_OPERATOR(name, since_version, function, signature, doc)                                                     \
    static_assert(::gr::count_tensors(signature) ==                                                                    \
                      std::pair(::gr::OperatorOf<function>::kInputs, ::gr::OperatorOf<function>::kOutputs),            \
                  "the signature names other tensors than the function takes");                                        \
    [[maybe_unused]] static const bool function##_is_registered =                                                      \
        ::gr::register_operator(new ::gr::OperatorOf<function>(name, since_version, doc), signature)
