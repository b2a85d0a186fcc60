#include "custom_op.h"

#include <array>
#include <cstring>
#include <thread>

namespace gr::ort {
namespace {

constexpr std::size_t kMaxRank = 8;

// True when `status` is success; else takes it away.
bool succeeded(const Api& api, OrtStatus* status) {
    if (status == nullptr)
        return true;
    api.ReleaseStatus(status);
    return false;
}

// The attributes of a node.
class NodeAttributes : public AttributeSource {
public:
    NodeAttributes(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

    bool read(const char* op, const char* name, std::int64_t& value) const override {
        std::int64_t integer;
        if (!succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name, &integer)))
            return require_absent(op, name, "an integer");
        value = integer;
        return true;
    }
    bool read(const char* op, const char* name, float& value) const override {
        float number;
        if (!succeeded(api_, api_.KernelInfoGetAttribute_float(info_, name, &number)))
            return require_absent(op, name, "a float");
        value = number;
        return true;
    }
    bool read(const char* op, const char* name, std::string& value) const override {
        std::size_t size = 0; // counts the terminator
        if (!succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size)))
            return require_absent(op, name, "a string");
        std::string text(size, '\0');
        check(api_, api_.KernelInfoGetAttribute_string(info_, name, text.data(), &size));
        value = text.c_str();
        return true;
    }

private:
    // A node without the attribute and one with an attribute of another type fail alike; asking for the other types
    // tells them apart.
    bool require_absent(const char* op, const char* name, const char* expected) const {
        std::size_t size = 0;
        std::int64_t integer;
        float number;
        const char* found = succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size))
                                ? "a string"
                            : succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name, &integer)) ? "an integer"
                            : succeeded(api_, api_.KernelInfoGetAttribute_float(info_, name, &number))  ? "a float"
                                                                                                        : nullptr;
        if (found != nullptr)
            fail(op, "attribute ", name, " is ", found, ", expected ", expected);
        return false;
    }

    const Api& api_;
    const OrtKernelInfo* info_;
};

// A tensor of the runtime as the kernels see it.
struct BoundTensor {
    std::array<std::int64_t, kMaxRank> shape;
    GrTensor tensor;

    // Returns the tensor; NULL when `value` is.
    const GrTensor* bind(const Api& api, OrtValue* value, const char* op) {
        if (value == nullptr)
            return nullptr;
        OrtTensorTypeAndShapeInfo* info = nullptr;
        check(api, api.GetTensorTypeAndShape(value, &info));
        int type = 0;
        std::size_t rank = 0;
        OrtStatus* status = api.GetTensorElementType(info, &type);
        if (status == nullptr)
            status = api.GetDimensionsCount(info, &rank);
        if (status == nullptr && rank <= kMaxRank)
            status = api.GetDimensions(info, shape.data(), rank);
        api.ReleaseTensorTypeAndShapeInfo(info);
        check(api, status);
        if (rank > kMaxRank)
            fail(op, "a tensor has rank ", static_cast<std::int64_t>(rank), ", more than any argument may have");
        void* data = nullptr;
        check(api, api.GetTensorMutableData(value, &data));
        tensor = {data, type, static_cast<std::int32_t>(rank), shape.data(), nullptr};
        return &tensor;
    }
};

// The inputs and outputs of one call. Outputs are allocated here.
class Tensors {
public:
    Tensors(const Api& api, const Operator& op, OrtKernelContext* context) : api_(api), op_(op), context_(context) {
        bind_inputs();
        bind_outputs();
    }

    const GrTensor* const* inputs() const { return inputs_.data(); }
    const GrTensor* const* outputs() const { return outputs_.data(); }

private:
    static constexpr std::size_t kMost = 16;

    void bind_inputs() {
        std::size_t given = 0;
        check(api_, api_.KernelContext_GetInputCount(context_, &given));
        for (std::size_t k = 0; k < op_.inputs.size() && k < given; ++k) {
            const OrtValue* value = nullptr;
            check(api_, api_.KernelContext_GetInput(context_, k, &value));
            // The runtime has no accessor for const data; inputs are not written through this pointer.
            inputs_[k] = memory_[k].bind(api_, const_cast<OrtValue*>(value), op_.name);
        }
    }

    void bind_outputs() {
        std::size_t given = 0;
        check(api_, api_.KernelContext_GetOutputCount(context_, &given));
        for (std::size_t k = 0; k < op_.outputs.size() && k < given; ++k) {
            const Traits& traits = op_.outputs[k].traits;
            const GrTensor* like = inputs_[static_cast<std::size_t>(traits.like)];
            if (like == nullptr)
                continue;
            const auto rank = static_cast<std::size_t>(like->rank);
            std::array<std::int64_t, kMaxRank> shape;
            std::memcpy(shape.data(), like->shape, rank * sizeof(std::int64_t));
            if (traits.per_row && rank > 0)
                shape[rank - 1] = 1;
            OrtValue* value = nullptr;
            check(api_, api_.KernelContext_GetOutput(context_, k, shape.data(), rank, &value));
            outputs_[k] = memory_[op_.inputs.size() + k].bind(api_, value, op_.name);
        }
    }

    const Api& api_;
    const Operator& op_;
    OrtKernelContext* context_;
    std::array<BoundTensor, 2 * kMost> memory_;
    std::array<const GrTensor*, kMost> inputs_{}, outputs_{};
};

// The threads of the session that runs a kernel.
struct SessionThreads {
    SessionThreads(const Api& session_api, const OrtKernelContext* session_context)
        : api(session_api), context(session_context) {
        // A kernel cannot ask how many threads its session has. One task for each processor is enough for all of them,
        // and tasks beyond the session's threads find nothing left to do.
        static const auto processors = static_cast<std::int32_t>(std::thread::hardware_concurrency());
        threads.count = processors;
        threads.context = this;
        threads.parallel_for = [](void* opaque, void (*task)(void*, std::size_t), std::size_t total, void* argument) {
            const auto& session = *static_cast<const SessionThreads*>(opaque);
            check(session.api, session.api.KernelContext_ParallelFor(session.context, task, total, total, argument));
        };
    }

    const Api& api;
    const OrtKernelContext* context;
    GrThreads threads;
};

bool same(const ElementTypes& one, const ElementTypes& other) {
    if (one.variable == nullptr || other.variable == nullptr)
        return one.dtypes == other.dtypes;
    return std::strcmp(one.variable, other.variable) == 0;
}

std::vector<std::int32_t> types_of(const std::vector<TensorDeclaration>& tensors,
                                   const std::vector<ElementTypes>& variables, const std::vector<std::size_t>& chosen) {
    std::vector<std::int32_t> types;
    for (const TensorDeclaration& tensor : tensors) {
        types.push_back(tensor.traits.types.dtypes[0]);
        for (std::size_t v = 0; v < variables.size(); ++v)
            if (same(variables[v], tensor.traits.types))
                types.back() = variables[v].dtypes[chosen[v]];
    }
    return types;
}

} // namespace

void check(const Api& api, OrtStatus* status) {
    if (status == nullptr)
        return;
    const std::string message = api.GetErrorMessage(status);
    api.ReleaseStatus(status);
    throw std::runtime_error(message);
}

std::vector<Variant> variants_of(const Operator& op) {
    std::vector<ElementTypes> variables;
    for (const TensorDeclaration& input : op.inputs) {
        bool known = false;
        for (const ElementTypes& variable : variables)
            known = known || same(variable, input.traits.types);
        if (!known)
            variables.push_back(input.traits.types);
    }
    std::vector<Variant> variants;
    for (std::vector<std::size_t> chosen(variables.size(), 0);;) {
        variants.push_back({types_of(op.inputs, variables, chosen), types_of(op.outputs, variables, chosen)});
        std::size_t v = 0;
        while (v < variables.size() && ++chosen[v] == variables[v].count)
            chosen[v++] = 0;
        if (v == variables.size())
            return variants;
    }
}

CustomOp::CustomOp(const Operator& op, Variant variant, const Runtime& runtime)
    : OrtCustomOp{}, op_(op), variant_(std::move(variant)), api_(runtime.table) {
    const auto characteristic = [](const TensorDeclaration& tensor) {
        return tensor.traits.optional ? kOptional : kRequired;
    };
    static constexpr auto self = [](const OrtCustomOp* base) -> const CustomOp& {
        return *static_cast<const CustomOp*>(base);
    };
    static const auto characteristic_of = characteristic;
    version = kApiVersion;
    GetName = [](const OrtCustomOp* base) { return self(base).op_.name; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = [](const OrtCustomOp* base) { return self(base).op_.inputs.size(); };
    GetInputType = [](const OrtCustomOp* base, std::size_t k) -> int { return self(base).variant_.inputs[k]; };
    GetInputCharacteristic = [](const OrtCustomOp* base, std::size_t k) {
        return characteristic_of(self(base).op_.inputs[k]);
    };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return 0; };
    GetOutputTypeCount = [](const OrtCustomOp* base) { return self(base).op_.outputs.size(); };
    GetOutputType = [](const OrtCustomOp* base, std::size_t k) -> int { return self(base).variant_.outputs[k]; };
    GetOutputCharacteristic = [](const OrtCustomOp* base, std::size_t k) {
        return characteristic_of(self(base).op_.outputs[k]);
    };
    GetStartVersion = [](const OrtCustomOp* base) { return self(base).op_.since_version; };
    GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    GetMayInplace = op.may_inplace;
    ReleaseMayInplace = [](int*, int*) {};
    CreateKernelV2 = [](const OrtCustomOp* base, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
        return self(base).create_kernel(info, kernel);
    };
    KernelComputeV2 = [](void* opaque, OrtKernelContext* context) {
        const Kernel& kernel = *static_cast<const Kernel*>(opaque);
        return kernel.op->compute(*kernel.bound, context);
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    bool has_optional_input = false;
    for (const TensorDeclaration& input : op.inputs)
        has_optional_input = has_optional_input || input.traits.optional;
    if (runtime.infers_with_absent_inputs || !has_optional_input)
        InferOutputShapeFn = [](const OrtCustomOp* base, OrtShapeInferContext* context) {
            return as_status(self(base).api_, self(base).op_.name, [&] { self(base).infer_shapes(context); });
        };
}

OrtStatus* CustomOp::create_kernel(const OrtKernelInfo* info, void** kernel) const noexcept {
    return as_status(api_, op_.name, [&] { *kernel = new Kernel{this, op_.bind(NodeAttributes(api_, info))}; });
}

OrtStatus* CustomOp::compute(const BoundOperator& bound, OrtKernelContext* context) const noexcept {
    return as_status(api_, op_.name, [&] {
        const Tensors tensors(api_, op_, context);
        const SessionThreads session(api_, context);
        bound.run({op_.name, Threads(&session.threads)}, tensors.inputs(), tensors.outputs());
    });
}

void CustomOp::infer_shapes(OrtShapeInferContext* context) const {
    std::size_t given = 0;
    check(api_, api_.ShapeInferContext_GetInputCount(context, &given));
    for (std::size_t output = 0; output < op_.outputs.size(); ++output)
        if (static_cast<std::size_t>(op_.outputs[output].traits.like) < given)
            infer_shape(context, output);
}

void CustomOp::infer_shape(OrtShapeInferContext* context, std::size_t output) const {
    const Traits& traits = op_.outputs[output].traits;
    // The context owns what it hands out. It gives an unknown rank as 0, which no tensor with a shape of its own has
    // here, and whatever it refuses stays unknown too.
    OrtTensorTypeAndShapeInfo* info = nullptr;
    std::size_t rank = 0;
    if (!succeeded(api_,
                   api_.ShapeInferContext_GetInputTypeShape(context, static_cast<std::size_t>(traits.like), &info)))
        return;
    check(api_, api_.GetDimensionsCount(info, &rank));
    if (rank == 0 || rank > kMaxRank)
        return;
    std::array<std::int64_t, kMaxRank> sizes;
    std::array<const char*, kMaxRank> symbols;
    if (traits.per_row) {
        check(api_, api_.GetDimensions(info, sizes.data(), rank));
        check(api_, api_.GetSymbolicDimensions(info, symbols.data(), rank));
        sizes[rank - 1] = 1;
        symbols[rank - 1] = "";
        check(api_, api_.SetDimensions(info, sizes.data(), rank));
        check(api_, api_.SetSymbolicDimensions(info, symbols.data(), rank));
    }
    check(api_, api_.ShapeInferContext_SetOutputTypeShape(context, output, info));
}

} // namespace gr::ort
