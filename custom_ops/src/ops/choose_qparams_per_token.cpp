#include "../attributes.h"
#include "../choose_parameters.h"

namespace gr {
namespace {

struct T : TypeVariable<float, Float16, BFloat16> {
    static constexpr const char* name = "T";
};

struct SchemeAttribute : Attribute<std::string> {
    static constexpr const char* name = "scheme";
    static constexpr const char* doc = "\"asymmetric\": scale and zero point from least and largest element. "
                                       "\"symmetric\": the scale from the largest magnitude, the zero point 0.";
    SchemeAttribute() { value = "asymmetric"; }
    void check(const char* op) const { require_known(op, name, value, {"asymmetric", "symmetric"}); }
};

void choose_qparams_per_token(const Call& call, Input<T> input, RowOutput<double, 0> scales,
                              RowOutput<std::int64_t, 0> zero_points, SchemeAttribute scheme) {
    choose_parameters_per_token(call.op, input, scales, zero_points, scheme.value == "symmetric", call.threads);
}

GR_OPERATOR("ChooseQParamsPerToken", 1, choose_qparams_per_token, "input[...,D] -> scales[...,1], zero_points[...,1]",
            R"(Scale and zero point of each row, for codes -128..127.

Bit for bit torch's `quantized_decomposed.choose_qparams_per_token_asymmetric` or, with the scheme `symmetric`,
`choose_qparams_per_token`, widened to float64 and int64. Each step is rounded to the type of `input`, but the
symmetric scales of float16 are computed in float32. The zero point of a row with a NaN or an infinite range is the
least int64, as in torch on x86-64.

- `asymmetric`, with m = min(x, 0) and M = max(x, 0): `scale = max((M - m) / 255, 2^-23)`; `zero_point` is `-128 - m /
  scale` if `(-128 + m / scale) + (127 + M / scale) > 0`, else `127 - M / scale`, clamped and rounded half to even.
- `symmetric`: `scale = max(|x|, 1e-5) / 127`.)");

} // namespace
} // namespace gr
