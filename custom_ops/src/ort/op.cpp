#include "op.h"

#include <thread>

namespace gr::ort {
namespace {

// True when `status` is success; else takes it away.
bool succeeded(const Api& api, OrtStatus* status) {
    if (status == nullptr)
        return true;
    api.ReleaseStatus(status);
    return false;
}

bool has_string(const Api& api, const OrtKernelInfo* info, const char* name, std::size_t* size) {
    *size = 0;
    return succeeded(api, api.KernelInfoGetAttribute_string(info, name, nullptr, size));
}

bool has_int(const Api& api, const OrtKernelInfo* info, const char* name, std::int64_t* value) {
    return succeeded(api, api.KernelInfoGetAttribute_int64(info, name, value));
}

bool has_float(const Api& api, const OrtKernelInfo* info, const char* name, float* value) {
    return succeeded(api, api.KernelInfoGetAttribute_float(info, name, value));
}

// A node without the attribute and one with an attribute of another type fail alike; asking for the other types tells
// them apart.
void require_absent(const Api& api, const OrtKernelInfo* info, const char* op, const char* name, const char* expected) {
    std::size_t size;
    std::int64_t integer;
    float number;
    const char* found = has_string(api, info, name, &size)    ? "a string"
                        : has_int(api, info, name, &integer)  ? "an integer"
                        : has_float(api, info, name, &number) ? "a float"
                                                              : nullptr;
    if (found != nullptr)
        fail(op, "attribute ", name, " is ", found, ", expected ", expected);
}

} // namespace

void check(const Api& api, OrtStatus* status) {
    if (status == nullptr)
        return;
    const std::string message = api.GetErrorMessage(status);
    api.ReleaseStatus(status);
    throw std::runtime_error(message);
}

void read_attribute(const Api& api, const OrtKernelInfo* info, const char* op, const char* name, std::string& value) {
    std::size_t size;
    if (!has_string(api, info, name, &size))
        return require_absent(api, info, op, name, "a string");
    std::string text(size, '\0'); // size counts the terminator
    check(api, api.KernelInfoGetAttribute_string(info, name, text.data(), &size));
    value = text.c_str();
}

void read_attribute(const Api& api, const OrtKernelInfo* info, const char* op, const char* name, std::int64_t& value) {
    if (!has_int(api, info, name, &value))
        require_absent(api, info, op, name, "an integer");
}

void read_attribute(const Api& api, const OrtKernelInfo* info, const char* op, const char* name,
                    std::optional<float>& value) {
    float number;
    if (has_float(api, info, name, &number))
        value = number;
    else
        require_absent(api, info, op, name, "a float");
}

void TensorArgument::bind(const Api& api, OrtValue* value, const char* op) {
    if (value == nullptr)
        return;
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
    pointer = &tensor;
}

SessionThreads::SessionThreads(const Api& session_api, const OrtKernelContext* session_context)
    : api(session_api), context(session_context) {
    // A kernel cannot ask how many threads its session has. One task for each processor is enough for all of them, and
    // tasks beyond the session's threads find nothing left to do.
    static const auto processors = static_cast<std::int32_t>(std::thread::hardware_concurrency());
    threads.count = processors;
    threads.context = this;
    threads.parallel_for = [](void* opaque, void (*task)(void*, std::size_t), std::size_t total, void* argument) {
        const auto& session = *static_cast<const SessionThreads*>(opaque);
        OrtStatus* status = session.api.KernelContext_ParallelFor(session.context, task, total, total, argument);
        check(session.api, status);
    };
}

} // namespace gr::ort
