#include "../channels.h"
#include "../op.h"

namespace gr {
namespace {

struct Q : TypeVariable<std::int8_t, std::uint8_t> {
    static constexpr const char* name = "Q";
};
struct F : TypeVariable<float, double> {
    static constexpr const char* name = "F";
};
struct Z : TypeVariable<std::int8_t, std::int32_t, std::int64_t> {
    static constexpr const char* name = "Z";
};

void dequantize_per_token(const Call& call, Input<Q> codes, Input<F> scales, OptionalInput<Z> zero_points,
                          Output<float, 0> values) {
    dequantize_channels(ChannelOperands::per_token(call.op, "codes", codes, scales, zero_points, "values", values),
                        call.threads);
}

GR_OPERATOR("DequantizePerToken", 1, dequantize_per_token,
            "codes[...,D], scales[...,1], zero_points[...,1] -> values[...,D]",
            R"(float32 values of codes, with a scale and a zero point for each row.

`(code - zero_point) * scale` with the product in the type of `scales`, rounded to float32. `zero_points` absent: 0;
they are read at their own width, int8, int32 or int64.

That is torch's `quantized_decomposed.dequantize_per_token` bit for bit, save that the difference never wraps around.
torch subtracts in the wider of the two integer types, so that there 127 - (-128) is -1 when both are int8; here it is
255.)");

} // namespace
} // namespace gr
