// An OrtCustomOp from an operator of this library.
#pragma once

#include <vector>

#include "../op.h"
#include "abi.h"

namespace gr::ort {

// Throws what a failed call reports.
void check(const Api& api, OrtStatus* status);

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

// The element types of the inputs and outputs of an operator: one choice for each of its type variables.
struct Variant {
    std::vector<std::int32_t> inputs, outputs;
};

// Every choice that the operator's declaration allows. onnxruntime merges operators of one name that differ in types
// alone, and picks by the types of a node's inputs; that works in every version, where types left open do not.
std::vector<Variant> variants_of(const Operator& op);

class CustomOp : public OrtCustomOp {
public:
    CustomOp(const Operator& op, Variant variant, const Runtime& runtime);

private:
    struct Kernel {
        const CustomOp* op;
        std::unique_ptr<BoundOperator> bound;
    };

    OrtStatus* create_kernel(const OrtKernelInfo* info, void** kernel) const noexcept;
    OrtStatus* compute(const BoundOperator& bound, OrtKernelContext* context) const noexcept;
    void infer_shapes(OrtShapeInferContext* context) const;
    void infer_shape(OrtShapeInferContext* context, std::size_t output) const;

    const Operator& op_;
    Variant variant_;
    Api api_;
};

} // namespace gr::ort
