#include "../channels.h"
#include "../quantization_attributes.h"

namespace gr {
namespace {

struct T : TypeVariable<float, Float16, BFloat16> {
    static constexpr const char* name = "T";
};
struct F : TypeVariable<float, double> {
    static constexpr const char* name = "F";
};
struct Z : TypeVariable<std::int8_t, std::int32_t, std::int64_t> {
    static constexpr const char* name = "Z";
};

void quantize_per_channel(const Call& call, Input<T> input, Input<F> scales, OptionalInput<Z> zero_points,
                          Output<std::int8_t, 0> codes, AxisAttribute axis, QuantMinAttribute quant_min,
                          QuantMaxAttribute quant_max, BeforeZeroPoint rounding) {
    quantize_channels(
        ChannelOperands::per_channel(call.op, "input", input, scales, zero_points, "codes", codes, axis.value),
        quant_min.value, quant_max.value, !rounding.after_zero_point(), call.threads);
}

GR_OPERATOR("QuantizePerChannel", 1, quantize_per_channel, "input, scales[n], zero_points[n] -> codes",
            R"(int8 codes of floats, with a scale and a zero point for each of the n channels of an axis.

`clamp(round(x * (1 / scale)) + zero_point, quant_min, quant_max)` in the type of `scales`, rounded half to even: bit
for bit torch's `quantized_decomposed.quantize_per_channel`. With rounding `after_zero_point`, `clamp(round(x * (1 /
scale) + zero_point), quant_min, quant_max)`. `zero_points` absent: 0. NaN has code 0.)");

} // namespace
} // namespace gr
