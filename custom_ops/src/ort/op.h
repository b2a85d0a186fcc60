// An OrtCustomOp from a C++ function. `Op<kernel>` derives from the signature of `kernel` all that onnxruntime asks:
// types and number of inputs and outputs, which are optional, the shapes of the outputs, in-place pairs and attributes.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../error.h"
#include "abi.h"
#include "parameters.h"

namespace gr::ort {

constexpr std::size_t kMaxRank = 8;

// Throws what a failed call reports.
void check(const Api& api, OrtStatus* status);

// Reads an attribute into `value` where the node has it; throws where it has another type.
void read_attribute(const Api& api, const OrtKernelInfo* info, const char* op, const char* name, std::string& value);
void read_attribute(const Api& api, const OrtKernelInfo* info, const char* op, const char* name, std::int64_t& value);
void read_attribute(const Api& api, const OrtKernelInfo* info, const char* op, const char* name,
                    std::optional<float>& value);

// A tensor of the runtime as the kernels see it.
struct TensorArgument {
    std::array<std::int64_t, kMaxRank> shape;
    GrTensor tensor;
    const GrTensor* pointer = nullptr; // NULL: absent

    void bind(const Api& api, OrtValue* value, const char* op);
};

// The threads of the session that runs a kernel.
struct SessionThreads {
    SessionThreads(const Api& api, const OrtKernelContext* context);

    const Api& api;
    const OrtKernelContext* context;
    GrThreads threads;
};

// Runs `body` and makes a status of what it throws.
template <typename Body> OrtStatus* as_status(const Api& api, const char* op, const Body& body) noexcept {
    char error[1024] = "";
    const std::int32_t code = guarded(op, error, sizeof error, body);
    return code == GR_OK ? nullptr : api.CreateStatus(code, error);
}

// The onnxruntime that an operator is made for.
struct Runtime {
    const OrtApi* table;
    // Before 1.24, shape inference of a node with an absent input crashes ahead of the operator's own function.
    bool infers_with_absent_inputs;
};

template <auto Function> class Op;

template <typename... Parameters, std::int32_t (*Function)(Parameters...)> class Op<Function> : public OrtCustomOp {
public:
    Op(const char* name, int since_version, const Runtime& runtime);

private:
    static constexpr std::size_t kParameters = sizeof...(Parameters);
    static constexpr Traits kTraits[] = {Parameters::traits...};

    static constexpr std::size_t count(Role role) {
        std::size_t total = 0;
        for (const Traits& traits : kTraits)
            total += traits.role == role;
        return total;
    }
    static constexpr std::size_t kInputs = count(Role::Input), kOutputs = count(Role::Output);

    static constexpr bool has_optional_input() {
        for (const Traits& traits : kTraits)
            if (traits.role == Role::Input && traits.optional)
                return true;
        return false;
    }

    // Inputs come first in a signature, then outputs.
    static constexpr const Traits& output(std::size_t index) { return kTraits[kInputs + index]; }

    // Empty for parameters that are not attributes.
    template <typename Parameter>
    using Kept = std::conditional_t<Parameter::traits.role == Role::Attribute, Parameter, std::tuple<>>;

    struct Kernel {
        const Op* op;
        std::tuple<Kept<Parameters>...> attributes;
    };

    template <typename Attribute> void read(const OrtKernelInfo* info, Attribute& attribute) const {
        if constexpr (!std::is_same_v<Attribute, std::tuple<>>) {
            read_attribute(api_, info, name_, Attribute::name, attribute.value);
            attribute.check(name_);
        }
    }

    // The argument for parameter `Index`.
    template <std::size_t Index>
    static auto argument(const Kernel& kernel, const TensorArgument* tensors, const Call& call) {
        using Parameter = std::tuple_element_t<Index, std::tuple<Parameters...>>;
        if constexpr (Parameter::traits.role == Role::Attribute)
            return std::get<Index>(kernel.attributes);
        else if constexpr (Parameter::traits.role == Role::Call)
            return call;
        else
            return Parameter{{tensors[Index].pointer}};
    }

    template <std::size_t... Index>
    static std::int32_t invoke(const Kernel& kernel, const TensorArgument* tensors, const Call& call,
                               std::index_sequence<Index...>) {
        return Function(argument<Index>(kernel, tensors, call)...);
    }

    void bind_inputs(OrtKernelContext* context, TensorArgument* tensors) const;
    void bind_outputs(OrtKernelContext* context, TensorArgument* tensors) const;
    OrtStatus* compute(const Kernel& kernel, OrtKernelContext* context) const noexcept;
    void infer_shapes(OrtShapeInferContext* context) const;

    // The in-place pairs as the runtime wants them. It is given these arrays themselves: nothing is allocated on one
    // side of the library's border and freed on the other.
    struct Pairs {
        int inputs[kOutputs + 1] = {}, outputs[kOutputs + 1] = {};
        std::size_t count = 0;
    };
    static Pairs make_pairs() {
        Pairs pairs;
        for (std::size_t index = 0; index < kOutputs; ++index)
            if (output(index).in_place) {
                pairs.inputs[pairs.count] = output(index).like;
                pairs.outputs[pairs.count++] = static_cast<int>(index);
            }
        return pairs;
    }
    static std::size_t GR_ORT_CALL may_inplace(int** input_index, int** output_index) {
        static Pairs pairs = make_pairs();
        *input_index = pairs.inputs;
        *output_index = pairs.outputs;
        return pairs.count;
    }

    const char* name_;
    int since_version_;
    Api api_;
};

template <typename... Parameters, std::int32_t (*Function)(Parameters...)>
Op<Function>::Op(const char* name, int since_version, const Runtime& runtime)
    : OrtCustomOp{}, name_(name), since_version_(since_version), api_(runtime.table) {
    version = kApiVersion;
    GetName = [](const OrtCustomOp* op) { return static_cast<const Op*>(op)->name_; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = [](const OrtCustomOp*) { return kInputs; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) -> int { return kTraits[index].dtype; };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
        return kTraits[index].optional ? kOptional : kRequired;
    };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return 0; };
    GetOutputTypeCount = [](const OrtCustomOp*) { return kOutputs; };
    GetOutputType = [](const OrtCustomOp*, std::size_t index) -> int { return output(index).dtype; };
    GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
        return output(index).optional ? kOptional : kRequired;
    };
    GetStartVersion = [](const OrtCustomOp* op) { return static_cast<const Op*>(op)->since_version_; };
    GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    GetMayInplace = may_inplace;
    ReleaseMayInplace = [](int*, int*) {};
    CreateKernelV2 = [](const OrtCustomOp* base, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
        const Op& op = *static_cast<const Op*>(base);
        return as_status(op.api_, op.name_, [&] {
            Kernel created{&op, {}};
            std::apply([&](auto&... attribute) { (op.read(info, attribute), ...); }, created.attributes);
            *kernel = new Kernel(std::move(created));
        });
    };
    KernelComputeV2 = [](void* opaque, OrtKernelContext* context) {
        const Kernel& kernel = *static_cast<const Kernel*>(opaque);
        return kernel.op->compute(kernel, context);
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    if (runtime.infers_with_absent_inputs || !has_optional_input())
        InferOutputShapeFn = [](const OrtCustomOp* base, OrtShapeInferContext* context) {
            const Op& op = *static_cast<const Op*>(base);
            return as_status(op.api_, op.name_, [&] { op.infer_shapes(context); });
        };
}

template <typename... Parameters, std::int32_t (*Function)(Parameters...)>
void Op<Function>::bind_inputs(OrtKernelContext* context, TensorArgument* tensors) const {
    std::size_t given = 0;
    check(api_, api_.KernelContext_GetInputCount(context, &given));
    for (std::size_t index = 0; index < kInputs && index < given; ++index) {
        const OrtValue* value = nullptr;
        check(api_, api_.KernelContext_GetInput(context, index, &value));
        // The runtime has no accessor for const data; inputs are not written through this pointer.
        tensors[index].bind(api_, const_cast<OrtValue*>(value), name_);
    }
}

template <typename... Parameters, std::int32_t (*Function)(Parameters...)>
void Op<Function>::bind_outputs(OrtKernelContext* context, TensorArgument* tensors) const {
    std::size_t given = 0;
    check(api_, api_.KernelContext_GetOutputCount(context, &given));
    for (std::size_t index = 0; index < kOutputs && index < given; ++index) {
        const GrTensor* like = tensors[output(index).like].pointer;
        if (like == nullptr)
            continue;
        OrtValue* value = nullptr;
        check(api_,
              api_.KernelContext_GetOutput(context, index, like->shape, static_cast<std::size_t>(like->rank), &value));
        tensors[kInputs + index].bind(api_, value, name_);
    }
}

template <typename... Parameters, std::int32_t (*Function)(Parameters...)>
OrtStatus* Op<Function>::compute(const Kernel& kernel, OrtKernelContext* context) const noexcept {
    char error[1024] = "";
    std::int32_t code = GR_OK;
    const std::int32_t bound = guarded(name_, error, sizeof error, [&] {
        TensorArgument tensors[kInputs + kOutputs];
        bind_inputs(context, tensors);
        bind_outputs(context, tensors);
        const SessionThreads session(api_, context);
        code = invoke(kernel, tensors, Call{&session.threads, error, sizeof error},
                      std::make_index_sequence<kParameters>());
    });
    if (bound != GR_OK)
        code = bound;
    return code == GR_OK ? nullptr : api_.CreateStatus(code, error);
}

template <typename... Parameters, std::int32_t (*Function)(Parameters...)>
void Op<Function>::infer_shapes(OrtShapeInferContext* context) const {
    std::size_t given = 0;
    check(api_, api_.ShapeInferContext_GetInputCount(context, &given));
    for (std::size_t index = 0; index < kOutputs; ++index) {
        const std::size_t like = static_cast<std::size_t>(output(index).like);
        if (like >= given)
            continue;
        // The context owns what it hands out. It gives an unknown rank as 0, which no tensor with a shape of its own
        // has here, and whatever it refuses stays unknown too.
        OrtTensorTypeAndShapeInfo* info = nullptr;
        std::size_t rank = 0;
        if (OrtStatus* status = api_.ShapeInferContext_GetInputTypeShape(context, like, &info)) {
            api_.ReleaseStatus(status);
            continue;
        }
        check(api_, api_.GetDimensionsCount(info, &rank));
        if (rank > 0)
            check(api_, api_.ShapeInferContext_SetOutputTypeShape(context, index, info));
    }
}

} // namespace gr::ort
