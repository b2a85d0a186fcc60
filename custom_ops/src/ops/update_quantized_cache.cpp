#include "../quantization_attributes.h"
#include "../update_quantized.h"

namespace gr {
namespace {

struct T : TypeVariable<float, Float16, BFloat16> {
    static constexpr const char* name = "T";
};
struct Q : TypeVariable<std::int8_t, std::uint8_t> {
    static constexpr const char* name = "Q";
};
struct F : TypeVariable<float, double> {
    static constexpr const char* name = "F";
};

struct SchemeAttribute : Attribute<std::string> {
    static constexpr const char* name = "scheme";
    static constexpr const char* doc =
        "\"asymmetric\" or \"symmetric\": scales, and zero points, are chosen for each group of new elements. "
        "\"static\": they are given.";
    SchemeAttribute() { value = "asymmetric"; }
    void check(const char* op) const { require_known(op, name, value, {"asymmetric", "symmetric", "static"}); }
    Scheme scheme() const {
        return value == "static" ? Scheme::Static : value == "symmetric" ? Scheme::Symmetric : Scheme::Asymmetric;
    }
};

void update_quantized_cache(const Call& call, Input<T> value, Input<Q> codes, Input<F> scales,
                            Input<std::int64_t> start_pos, OptionalInput<Q> zero_points, InPlace<Q, 1> new_codes,
                            OptionalInPlace<F, 2> new_scales, OptionalInPlace<Q, 4> new_zero_points,
                            SchemeAttribute scheme, AfterZeroPoint rounding, ModeAttribute mode,
                            LayoutAttribute layout) {
    gr::update_quantized_cache(call.op,
                               {value, codes, scales, start_pos, zero_points, new_codes, new_scales, new_zero_points,
                                layout.layout(), mode.circular() ? CacheMode::Circular : CacheMode::Linear,
                                scheme.scheme(), !rounding.after_zero_point()},
                               call.threads);
}

GR_OPERATOR("UpdateQuantizedCache", 1, update_quantized_cache,
            "value[B,S,H,D], codes[B,C,H,P], scales, start_pos, zero_points -> new_codes[B,C,H,P], new_scales, "
            "new_zero_points",
            R"(Quantizes the new rows `value` and writes codes, scales and zero points into a cache, in one pass.

`start_pos` and `write_mode` say where rows go, as in UpdateCache. float16 and bfloat16 values are first converted to
float32, which is exact. All rounding is half to even.

Codes are int8 (-128..127, P = D), or int4 (0..15) in uint8: two in a byte, element 2k in the low four bits (P = D/2,
D even).

Schemes `asymmetric` and `symmetric` choose scales from the new elements. `scales` is float32 `[B,C,H,n]` and
`zero_points` `[B,C,H,n]`, where n divides D: each group of D/n consecutive elements has its own (n = 1: one per token
and head; for int4, D/n is even). `new_scales` and, exactly where `zero_points` is given, `new_zero_points` are
outputs.

- `asymmetric` needs `zero_points`. With codes low..high, m = min(x, 0) and M = max(x, 0) of a group, in float32:
  `scale = max((M - m) / (high - low), 2^-23)`; `zero_point` is `low - m / scale` if `(low + m / scale) + (high + M /
  scale) > 0`, else `high - M / scale`, clamped to the codes and rounded. With rounding `after_zero_point`, codes are
  `clamp(round(x * (1 / scale) + zero_point))` in float64; with `before_zero_point`, `clamp(round(x * (1 / scale)) +
  zero_point)` in float32. For int8 that is torch's `choose_qparams_per_token_asymmetric` with `quantize_per_token`,
  or torchao's `quantize_affine`, bit for bit.
- `symmetric`: `scale = max(|x|, 1e-5) / 127` (int4: `/ 7`) and codes `clamp(round(x * (1 / scale)))` within -128..127
  (int4: -8..7, stored with 8 added), in float32. For int8 that is torch's `choose_qparams_per_token` with
  `quantize_per_token`. `zero_points`, when given, become 0 (int4: 8).

A group with a NaN, or whose range overflows, has that scale (NaN or infinity); a code or zero point that would be NaN
is 0 (symmetric int4: 8). Asymmetric codes of finite elements beside an infinite one are the least code.

Scheme `static`: `scales` is float32 or float64 and broadcasts to `[H,D]`, and so does `zero_points` (absent: 0, for
int4 8); both are only read, and neither `new_scales` nor `new_zero_points` may be an output. In the type of `scales`,
codes are `clamp(round(x / scale + zero_point))`, or `clamp(round(x / scale) + zero_point)` with rounding
`before_zero_point`; NaN has code 0. A scale that is not a positive finite number is an error.

When outputs share the buffers of their inputs, only the new rows are written, so the cost does not depend on C.)");

} // namespace
} // namespace gr
