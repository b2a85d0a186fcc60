// The entry point through which onnxruntime finds the operators.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "../isa.h"
#include "custom_op.h"

namespace gr::ort {
namespace {

constexpr const char* kDomain = "graphrewrite";

// What one runtime in this process was given. A domain must outlive every session that uses it, and nothing says when
// the last one ends, so it is kept until the process does. The runtime may be unloaded before this library's static
// objects are destroyed, so they are never destroyed either.
struct Registration {
    const OrtApi* table;
    OrtCustomOpDomain* domain;
};

OrtCustomOpDomain* create_domain(const Runtime& runtime) {
    const Api api(runtime.table);
    OrtCustomOpDomain* domain = nullptr;
    check(api, api.CreateCustomOpDomain(kDomain, &domain));
    for (const Operator* op : all_operators())
        for (Variant& variant : variants_of(*op))
            check(api, api.CustomOpDomain_Add(domain, new CustomOp(*op, std::move(variant), runtime)));
    return domain;
}

// The domain for a runtime. A process may hold several.
OrtCustomOpDomain* domain_for(const Runtime& runtime) {
    static std::mutex& mutex = *new std::mutex;
    static std::vector<Registration>& registrations = *new std::vector<Registration>;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Registration& registration : registrations)
        if (registration.table == runtime.table)
            return registration.domain;
    registrations.push_back({runtime.table, create_domain(runtime)});
    return registrations.back().domain;
}

// Whether a version, "major.minor...", is no older than that. Asking GetApi instead would print a complaint.
bool at_least(const char* version, long major, long minor) {
    char* rest = nullptr;
    const long found = std::strtol(version, &rest, 10);
    return found > major || (found == major && *rest == '.' && std::strtol(rest + 1, nullptr, 10) >= minor);
}

} // namespace
} // namespace gr::ort

extern "C" GR_API OrtStatus* GR_ORT_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);

OrtStatus* GR_ORT_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
    constexpr const char* kName = "RegisterCustomOps";
    const OrtApi* table = base->GetApi(gr::ort::kApiVersion);
    if (table == nullptr) {
        // Too old for what this library uses. CreateStatus has been the first entry of every version.
        char message[256] = "graphrewrite's kernel library needs onnxruntime 1.18 or later, this is ";
        const std::size_t used = std::strlen(message);
        gr::copy_message(base->GetVersionString(), message + used, sizeof message - used);
        const OrtApi* oldest = base->GetApi(1);
        return oldest == nullptr ? nullptr : gr::ort::Api(oldest).CreateStatus(GR_FAIL, message);
    }
    const gr::ort::Runtime runtime{table, gr::ort::at_least(base->GetVersionString(), 1, 24)};
    const gr::ort::Api api(table);
    return gr::ort::as_status(api, kName, [&] {
        gr::active_kernels(kName);
        gr::ort::check(api, api.AddCustomOpDomain(options, gr::ort::domain_for(runtime)));
    });
}
