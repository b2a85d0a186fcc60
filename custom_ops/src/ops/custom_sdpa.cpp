#include "../attend.h"
#include "../attention_check.h"
#include "../attributes.h"
#include "../isa.h"
#include "../op.h"

namespace gr {
namespace {

struct T : TypeVariable<float, Float16, BFloat16> {
    static constexpr const char* name = "T";
};
struct C : TypeVariable<float, Float16, BFloat16, std::int8_t, std::uint8_t> {
    static constexpr const char* name = "C";
};
struct F : TypeVariable<float, double> {
    static constexpr const char* name = "F";
};
struct M : TypeVariable<bool, float, Float16, BFloat16> {
    static constexpr const char* name = "M";
};

void custom_sdpa(const Call& call, Input<T> query, Input<C> key_cache, Input<C> value_cache,
                 Input<std::int64_t> start_pos, OptionalInput<F> key_scales, OptionalInput<C> key_zero_points,
                 OptionalInput<F> value_scales, OptionalInput<C> value_zero_points, OptionalInput<T> recent_key,
                 OptionalInput<T> recent_value, OptionalInput<M> attn_mask, OptionalInput<T> sinks, Output<T, 0> output,
                 CausalAttribute is_causal, ScaleAttribute scale, SoftcapAttribute softcap, WindowAttribute window,
                 SinkTokensAttribute sink_tokens, LayoutAttribute layout) {
    const AttentionArguments arguments{query,        key_cache,         value_cache,     start_pos,
                                       key_scales,   key_zero_points,   value_scales,    value_zero_points,
                                       recent_key,   recent_value,      attn_mask,       sinks,
                                       output,       is_causal.value,   scale.pointer(), softcap.value,
                                       window.value, sink_tokens.value, layout.layout()};
    PreparedAttention(check_attention(call.op, arguments), active_kernels(call.op).attention, call.threads).run();
}

GR_OPERATOR("CustomSdpa", 1, custom_sdpa,
            "query[B,S,Hq,D], key_cache[B,C,Hkv,P], value_cache[B,C,Hkv,P], start_pos, key_scales, key_zero_points, "
            "value_scales, value_zero_points, recent_key[B,S,Hkv,D], recent_value[B,S,Hkv,D], attn_mask, sinks[Hq] "
            "-> output[B,S,Hq,D]",
            R"(Attention of new tokens over a key/value cache, which is read where it lies.

Query row i of a sequence has position p = `start_pos` + i, where 0 <= `start_pos` and `start_pos` + S <= C; `start_pos`
is one number, or one for each sequence. Query head h reads key/value head h / (Hq / Hkv). The output row is the sum of
the value rows, weighted by the softmax of their scores:

1. score = `scale` * query . key (`scale` absent: 1 / sqrt(D))
2. with `softcap` > 0: score = `softcap` * tanh(score / `softcap`)
3. with a float `attn_mask`: score = score + mask
4. with `sinks`: exp(`sinks[h]`) joins the denominator of the softmax, and brings no value. Minus infinity: no effect.

Row i sees key j where all of this holds:

- j < kv, the number of keys the mask covers; without a mask j < `start_pos` + S
- with `is_causal`: j <= p
- with `window` > 0: j > p - `window`, or j < `sink_tokens`
- with a mask: it is true, or above minus infinity

A row that sees no key yields zeros. What a row does not see never reaches its output, not even NaN. A row of which
every score it sees is minus infinity, which takes infinite or overflowing input, yields zeros or NaN.

`attn_mask` is `[S,kv]`, `[Hq,S,kv]` or `[B,Hq,S,kv]` with kv <= C, and any of the other sizes may be 1. It has this
order whatever the layout.

Caches hold floats (P = D; of any type, whatever that of the query), or codes that stand for float32(code -
zero_point) * scale:

- int8, P = D
- int4 in uint8, P = D/2: two codes 0..15 in a byte, element 2k in the low four bits

Codes need scales, and may have zero points (absent: 0, for int4 8) of the type of the cache. Scales and zero points are
`[B,C,Hkv,n]` where n divides D, one for each group of D/n consecutive elements of a row; or they hold for all rows:
`[]`, `[1]`, `[D]`, `[Hkv|1,1]` or `[Hkv|1,D]`. Only scales of the latter kind may be float64; they are rounded to float32.

`recent_key` and `recent_value`, both or neither, take the place of the rows that the caches have at `start_pos` to
`start_pos` + S - 1: the new tokens before they were quantized.

Everything is computed in float32, to which float16 and bfloat16 are converted exactly; the output is rounded once. The
cost is that of the keys between the first and the last one that the window and causality leave, not of the capacity.)");

} // namespace
} // namespace gr
