// The operators, as functions of their ONNX signatures, and the entry point through which onnxruntime finds them.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "../attention_check.h"
#include "../isa.h"
#include "../update.h"
#include "op.h"

namespace gr::ort {
namespace {

constexpr const char* kDomain = "graphrewrite";

struct LayoutAttribute : AttributeParameter {
    static constexpr const char* name = "layout";
    std::string value = "BSNH";
    void check(const char* op) const { parse_layout(op, value.c_str()); }
};

struct SchemeAttribute : AttributeParameter {
    static constexpr const char* name = "scheme";
    std::string value = "asymmetric";
    void check(const char* op) const { is_symmetric(op, value.c_str()); }
};

struct CausalAttribute : AttributeParameter {
    static constexpr const char* name = "is_causal";
    std::int64_t value = 0;
    void check(const char* op) const {
        if (value != 0 && value != 1)
            fail(op, "is_causal is ", value, ", expected 0 or 1");
    }
    operator std::int32_t() const { return value != 0; }
};

struct ScaleAttribute : AttributeParameter {
    static constexpr const char* name = "scale";
    std::optional<float> value;
    void check(const char* op) const {
        if (value)
            check_scale(op, *value);
    }
    const float* pointer() const { return value ? &*value : nullptr; }
};

template <typename T>
std::int32_t update_cache(Input<T> value, Input<T> cache, Input<std::int64_t> start_pos, InPlace<T, 1> new_cache,
                          LayoutAttribute layout, Call call) {
    return gr_update_cache(value, cache, start_pos, new_cache, layout.value.c_str(), call.threads, call.error,
                           call.error_size);
}

std::int32_t update_quantized_cache(Input<float> value, Input<std::int8_t> codes, Input<float> scales,
                                    Input<std::int64_t> start_pos, OptionalInput<std::int8_t> zero_points,
                                    InPlace<std::int8_t, 1> new_codes, InPlace<float, 2> new_scales,
                                    OptionalInPlace<std::int8_t, 4> new_zero_points, SchemeAttribute scheme,
                                    LayoutAttribute layout, Call call) {
    return gr_update_quantized_cache(value, codes, scales, start_pos, zero_points, new_codes, new_scales,
                                     new_zero_points, scheme.value.c_str(), layout.value.c_str(), call.threads,
                                     call.error, call.error_size);
}

template <typename Cache, typename Mask>
std::int32_t custom_sdpa(Input<float> query, Input<Cache> key_cache, Input<Cache> value_cache,
                         Input<std::int64_t> start_pos, OptionalInput<float> key_scales,
                         OptionalInput<std::int8_t> key_zero_points, OptionalInput<float> value_scales,
                         OptionalInput<std::int8_t> value_zero_points, OptionalInput<float> recent_key,
                         OptionalInput<float> recent_value, OptionalInput<Mask> attn_mask, Output<float, 0> output,
                         CausalAttribute is_causal, ScaleAttribute scale, LayoutAttribute layout, Call call) {
    return gr_custom_sdpa(query, key_cache, value_cache, start_pos, key_scales, key_zero_points, value_scales,
                          value_zero_points, recent_key, recent_value, attn_mask, output, is_causal, scale.pointer(),
                          layout.value.c_str(), call.threads, call.error, call.error_size);
}

template <typename Mask>
std::int32_t sdpa_with_kv_cache(Input<float> query, Input<float> key, Input<float> value, Input<float> key_cache,
                                Input<float> value_cache, Input<std::int64_t> start_pos, OptionalInput<Mask> attn_mask,
                                Output<float, 0> output, InPlace<float, 3> new_key_cache,
                                InPlace<float, 4> new_value_cache, CausalAttribute is_causal, ScaleAttribute scale,
                                LayoutAttribute layout, Call call) {
    return gr_sdpa_with_kv_cache(query, key, value, key_cache, value_cache, start_pos, attn_mask, output, new_key_cache,
                                 new_value_cache, is_causal, scale.pointer(), layout.value.c_str(), call.threads,
                                 call.error, call.error_size);
}

// What one runtime in this process was given. A domain must outlive every session that uses it, and nothing says when
// the last one ends, so it is kept until the process does. The runtime may be unloaded before this library's static
// objects are destroyed, so they are never destroyed either.
struct Registration {
    const OrtApi* table;
    OrtCustomOpDomain* domain;
};

// Declares an operator of this library: its name, the version of the domain it came with, and the function it runs.
// An operator with several element types is declared once for each; the runtime picks by the types of a node's inputs.
#define GR_DECLARE_OP(name, since_version, ...)                                                                        \
    check(api, api.CustomOpDomain_Add(domain, new Op<__VA_ARGS__>(name, since_version, runtime)))

OrtCustomOpDomain* create_domain(const Runtime& runtime) {
    const Api api(runtime.table);
    OrtCustomOpDomain* domain = nullptr;
    check(api, api.CreateCustomOpDomain(kDomain, &domain));
    GR_DECLARE_OP("UpdateCache", 1, update_cache<float>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<std::uint8_t>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<std::int8_t>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<std::int32_t>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<std::int64_t>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<bool>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<Float16>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<double>);
    GR_DECLARE_OP("UpdateCache", 1, update_cache<BFloat16>);
    GR_DECLARE_OP("UpdateQuantizedCache", 1, update_quantized_cache);
    GR_DECLARE_OP("CustomSdpa", 1, custom_sdpa<float, float>);
    GR_DECLARE_OP("CustomSdpa", 1, custom_sdpa<float, bool>);
    GR_DECLARE_OP("CustomSdpa", 1, custom_sdpa<std::int8_t, float>);
    GR_DECLARE_OP("CustomSdpa", 1, custom_sdpa<std::int8_t, bool>);
    GR_DECLARE_OP("SdpaWithKvCache", 1, sdpa_with_kv_cache<float>);
    GR_DECLARE_OP("SdpaWithKvCache", 1, sdpa_with_kv_cache<bool>);
    return domain;
}

#undef GR_DECLARE_OP

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
