// The part of onnxruntime's C interface that is used, declared by hand: its wheels carry no headers, and the interface
// only ever grows at the end, so one binary loads in every onnxruntime from 1.18 on.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define GR_ORT_CALL __stdcall
#else
#define GR_ORT_CALL
#endif

extern "C" {

struct OrtAllocator;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

// A table of functions in a fixed order; see `Api` for the entries used.
struct OrtApi;

struct OrtApiBase {
    const OrtApi*(GR_ORT_CALL* GetApi)(std::uint32_t version); // NULL: the runtime is older than that
    const char*(GR_ORT_CALL* GetVersionString)();
};

// One operator for one combination of element types. A runtime reads the entries that `version` says are there.
struct OrtCustomOp {
    std::uint32_t version;
    void*(GR_ORT_CALL* CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
    const char*(GR_ORT_CALL* GetName)(const OrtCustomOp*);
    const char*(GR_ORT_CALL* GetExecutionProviderType)(const OrtCustomOp*);
    int(GR_ORT_CALL* GetInputType)(const OrtCustomOp*, std::size_t);
    std::size_t(GR_ORT_CALL* GetInputTypeCount)(const OrtCustomOp*);
    int(GR_ORT_CALL* GetOutputType)(const OrtCustomOp*, std::size_t);
    std::size_t(GR_ORT_CALL* GetOutputTypeCount)(const OrtCustomOp*);
    void(GR_ORT_CALL* KernelCompute)(void*, OrtKernelContext*);
    void(GR_ORT_CALL* KernelDestroy)(void*);
    int(GR_ORT_CALL* GetInputCharacteristic)(const OrtCustomOp*, std::size_t);
    int(GR_ORT_CALL* GetOutputCharacteristic)(const OrtCustomOp*, std::size_t);
    int(GR_ORT_CALL* GetInputMemoryType)(const OrtCustomOp*, std::size_t);
    int(GR_ORT_CALL* GetVariadicInputMinArity)(const OrtCustomOp*);
    int(GR_ORT_CALL* GetVariadicInputHomogeneity)(const OrtCustomOp*);
    int(GR_ORT_CALL* GetVariadicOutputMinArity)(const OrtCustomOp*);
    int(GR_ORT_CALL* GetVariadicOutputHomogeneity)(const OrtCustomOp*);
    OrtStatus*(GR_ORT_CALL* CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
    OrtStatus*(GR_ORT_CALL* KernelComputeV2)(void*, OrtKernelContext*);
    OrtStatus*(GR_ORT_CALL* InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
    int(GR_ORT_CALL* GetStartVersion)(const OrtCustomOp*);
    int(GR_ORT_CALL* GetEndVersion)(const OrtCustomOp*);
    std::size_t(GR_ORT_CALL* GetMayInplace)(int** input_index, int** output_index);
    void(GR_ORT_CALL* ReleaseMayInplace)(int* input_index, int* output_index);
    std::size_t(GR_ORT_CALL* GetAliasMap)(int** input_index, int** output_index);
    void(GR_ORT_CALL* ReleaseAliasMap)(int* input_index, int* output_index);
};

} // extern "C"

namespace gr::ort {

// The first version whose table and OrtCustomOp have all that is used (in-place pairs, ParallelFor, shape inference).
constexpr std::uint32_t kApiVersion = 18;

constexpr int kRequired = 0, kOptional = 1; // GetInputCharacteristic, GetOutputCharacteristic

// The functions of an OrtApi by name. A function that returns OrtStatus* returns NULL on success.
class Api {
public:
    explicit Api(const OrtApi* table) : table_(reinterpret_cast<const AnyFunction*>(table)) {}

    OrtStatus* CreateStatus(int code, const char* message) const { return call<0, OrtStatus*>(code, message); }
    const char* GetErrorMessage(const OrtStatus* status) const { return call<2, const char*>(status); }
    OrtStatus* CreateCustomOpDomain(const char* name, OrtCustomOpDomain** domain) const {
        return call<26, OrtStatus*>(name, domain);
    }
    OrtStatus* CustomOpDomain_Add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
        return call<27, OrtStatus*>(domain, op);
    }
    OrtStatus* AddCustomOpDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
        return call<28, OrtStatus*>(options, domain);
    }
    OrtStatus* GetTensorMutableData(OrtValue* value, void** data) const { return call<51, OrtStatus*>(value, data); }
    OrtStatus* SetDimensions(OrtTensorTypeAndShapeInfo* info, const std::int64_t* dims, std::size_t count) const {
        return call<59, OrtStatus*>(info, dims, count);
    }
    OrtStatus* GetTensorElementType(const OrtTensorTypeAndShapeInfo* info, int* type) const {
        return call<60, OrtStatus*>(info, type);
    }
    OrtStatus* GetDimensionsCount(const OrtTensorTypeAndShapeInfo* info, std::size_t* count) const {
        return call<61, OrtStatus*>(info, count);
    }
    OrtStatus* GetDimensions(const OrtTensorTypeAndShapeInfo* info, std::int64_t* dims, std::size_t count) const {
        return call<62, OrtStatus*>(info, dims, count);
    }
    OrtStatus* GetSymbolicDimensions(const OrtTensorTypeAndShapeInfo* info, const char** names,
                                     std::size_t count) const {
        return call<63, OrtStatus*>(info, names, count);
    }
    OrtStatus* GetTensorTypeAndShape(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) const {
        return call<65, OrtStatus*>(value, info);
    }
    OrtStatus* KernelInfoGetAttribute_float(const OrtKernelInfo* info, const char* name, float* value) const {
        return call<85, OrtStatus*>(info, name, value);
    }
    OrtStatus* KernelInfoGetAttribute_int64(const OrtKernelInfo* info, const char* name, std::int64_t* value) const {
        return call<86, OrtStatus*>(info, name, value);
    }
    OrtStatus* KernelInfoGetAttribute_string(const OrtKernelInfo* info, const char* name, char* value,
                                             std::size_t* size) const {
        return call<87, OrtStatus*>(info, name, value, size);
    }
    OrtStatus* KernelContext_GetInputCount(const OrtKernelContext* context, std::size_t* count) const {
        return call<88, OrtStatus*>(context, count);
    }
    OrtStatus* KernelContext_GetOutputCount(const OrtKernelContext* context, std::size_t* count) const {
        return call<89, OrtStatus*>(context, count);
    }
    OrtStatus* KernelContext_GetInput(const OrtKernelContext* context, std::size_t index,
                                      const OrtValue** value) const {
        return call<90, OrtStatus*>(context, index, value);
    }
    OrtStatus* KernelContext_GetOutput(OrtKernelContext* context, std::size_t index, const std::int64_t* dims,
                                       std::size_t count, OrtValue** value) const {
        return call<91, OrtStatus*>(context, index, dims, count, value);
    }
    void ReleaseStatus(OrtStatus* status) const { call<93, void>(status); }
    void ReleaseTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo* info) const { call<99, void>(info); }
    OrtStatus* ShapeInferContext_GetInputCount(const OrtShapeInferContext* context, std::size_t* count) const {
        return call<267, OrtStatus*>(context, count);
    }
    OrtStatus* ShapeInferContext_GetInputTypeShape(const OrtShapeInferContext* context, std::size_t index,
                                                   OrtTensorTypeAndShapeInfo** info) const {
        return call<268, OrtStatus*>(context, index, info);
    }
    OrtStatus* ShapeInferContext_SetOutputTypeShape(const OrtShapeInferContext* context, std::size_t index,
                                                    const OrtTensorTypeAndShapeInfo* info) const {
        return call<270, OrtStatus*>(context, index, info);
    }
    OrtStatus* SetSymbolicDimensions(OrtTensorTypeAndShapeInfo* info, const char** names, std::size_t count) const {
        return call<271, OrtStatus*>(info, names, count);
    }
    OrtStatus* KernelContext_ParallelFor(const OrtKernelContext* context, void (*task)(void*, std::size_t),
                                         std::size_t total, std::size_t batches, void* argument) const {
        return call<274, OrtStatus*>(context, task, total, batches, argument);
    }

private:
    using AnyFunction = void (*)();

    // The arguments are passed with exactly the types the wrappers above declare.
    template <std::size_t Slot, typename Result, typename... Arguments> Result call(Arguments... arguments) const {
        return reinterpret_cast<Result(GR_ORT_CALL*)(Arguments...)>(table_[Slot])(arguments...);
    }

    const AnyFunction* table_;
};

} // namespace gr::ort
