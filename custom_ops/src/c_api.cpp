// The C interface: exceptions end here.
#include "attention_check.h"
#include "error.h"
#include "isa.h"
#include "update.h"

using namespace gr;

const char* gr_version() {
    return GRAPHREWRITE_VERSION;
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

std::int32_t gr_update_cache(const GrTensor* value, const GrTensor* cache, const GrTensor* start_pos,
                             const GrTensor* new_cache, const char* layout, const GrThreads* threads, char* error,
                             std::size_t error_size) {
    constexpr const char* op = "UpdateCache";
    return guarded(op, error, error_size, [&] {
        CacheUpdate(op, "value", value, "cache", cache, "new_cache", new_cache, start_pos, parse_layout(op, layout))
            .run(Threads(threads));
    });
}

std::int32_t gr_update_quantized_cache(const GrTensor* value, const GrTensor* codes, const GrTensor* scales,
                                       const GrTensor* start_pos, const GrTensor* zero_points,
                                       const GrTensor* new_codes, const GrTensor* new_scales,
                                       const GrTensor* new_zero_points, const char* scheme, const char* layout,
                                       const GrThreads* threads, char* error, std::size_t error_size) {
    return guarded("UpdateQuantizedCache", error, error_size, [&] {
        update_quantized_cache(value, codes, scales, start_pos, zero_points, new_codes, new_scales, new_zero_points,
                               scheme, layout, Threads(threads));
    });
}

std::int32_t gr_custom_sdpa(const GrTensor* query, const GrTensor* key_cache, const GrTensor* value_cache,
                            const GrTensor* start_pos, const GrTensor* key_scales, const GrTensor* key_zero_points,
                            const GrTensor* value_scales, const GrTensor* value_zero_points, const GrTensor* recent_key,
                            const GrTensor* recent_value, const GrTensor* attn_mask, const GrTensor* output,
                            std::int32_t is_causal, const float* scale, const char* layout, const GrThreads* threads,
                            char* error, std::size_t error_size) {
    constexpr const char* op = "CustomSdpa";
    return guarded(op, error, error_size, [&] {
        const Attention attention = check_attention(
            op, {query, key_cache, value_cache, start_pos, key_scales, key_zero_points, value_scales, value_zero_points,
                 recent_key, recent_value, attn_mask, output, is_causal != 0, scale, parse_layout(op, layout)});
        attend(attention, active_kernels(op).attention, Threads(threads));
    });
}

std::int32_t gr_sdpa_with_kv_cache(const GrTensor* query, const GrTensor* key, const GrTensor* value,
                                   const GrTensor* key_cache, const GrTensor* value_cache, const GrTensor* start_pos,
                                   const GrTensor* attn_mask, const GrTensor* output, const GrTensor* new_key_cache,
                                   const GrTensor* new_value_cache, std::int32_t is_causal, const float* scale,
                                   const char* layout, const GrThreads* threads, char* error, std::size_t error_size) {
    constexpr const char* op = "SdpaWithKvCache";
    return guarded(op, error, error_size, [&] {
        const AttentionArguments arguments{query,     key_cache, value_cache,    start_pos, nullptr,
                                           nullptr,   nullptr,   nullptr,        nullptr,   nullptr,
                                           attn_mask, output,    is_causal != 0, scale,     parse_layout(op, layout)};
        sdpa_with_kv_cache(op, arguments, key, value, new_key_cache, new_value_cache, Threads(threads));
    });
}
