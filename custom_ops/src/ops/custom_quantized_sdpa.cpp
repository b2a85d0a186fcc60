#include "../attend.h"
#include "../attention_check.h"
#include "../attributes.h"
#include "../isa.h"
#include "../op.h"

namespace gr {
namespace {

struct C : TypeVariable<float, Float16, BFloat16, std::int8_t, std::uint8_t> {
    static constexpr const char* name = "C";
};
struct F : TypeVariable<float, double> {
    static constexpr const char* name = "F";
};
struct M : TypeVariable<bool, float, Float16, BFloat16> {
    static constexpr const char* name = "M";
};

void custom_quantized_sdpa(const Call& call, Input<std::int8_t> query, Input<C> key_cache, Input<C> value_cache,
                           Input<std::int64_t> start_pos, Input<float> query_scales,
                           OptionalInput<std::int8_t> query_zero_points, OptionalInput<F> key_scales,
                           OptionalInput<C> key_zero_points, OptionalInput<F> value_scales,
                           OptionalInput<C> value_zero_points, OptionalInput<float> recent_key,
                           OptionalInput<float> recent_value, OptionalInput<M> attn_mask, OptionalInput<float> sinks,
                           Output<float, 0> output, CausalAttribute is_causal, ScaleAttribute scale,
                           SoftcapAttribute softcap, WindowAttribute window, SinkTokensAttribute sink_tokens,
                           LayoutAttribute layout) {
    const AttentionArguments arguments{
        query,           key_cache,         value_cache,      start_pos,     key_scales,   key_zero_points,
        value_scales,    value_zero_points, recent_key,       recent_value,  attn_mask,    sinks,
        output,          is_causal.value,   scale.pointer(),  softcap.value, window.value, sink_tokens.value,
        layout.layout(), query_scales,      query_zero_points};
    PreparedAttention(check_attention(call.op, arguments), active_kernels(call.op).attention, call.threads).run();
}

GR_OPERATOR("CustomQuantizedSdpa", 1, custom_quantized_sdpa,
            "query[B,S,Hq,D], key_cache[B,C,Hkv,P], value_cache[B,C,Hkv,P], start_pos, query_scales[B,S,Hq,1], "
            "query_zero_points[B,S,Hq,1], key_scales, key_zero_points, value_scales, value_zero_points, "
            "recent_key[B,S,Hkv,D], recent_value[B,S,Hkv,D], attn_mask, sinks[Hq] -> output[B,S,Hq,D]",
            R"(CustomSdpa with an int8 query that stands for float32(query - zero_point) * scale.

`query_scales` and `query_zero_points` (absent: 0) are `[B,S,Hq,1]`, one for each row of the query. All else is as in
CustomSdpa, with a float32 output.)");

} // namespace
} // namespace gr
