// Quantization without vector instructions: the oracle of the kernels for instruction sets. Compiled without
// contraction of a * b + c, which would round once where torch rounds twice.
#include <cmath>
#include <cstring>
#include <limits>

#include "isa.h"
#include "quantize.h"

namespace gr {
namespace {

Extremes extremes(const float* row, std::int64_t count) {
    float lowest = 0, highest = 0;
    for (std::int64_t k = 0; k < count; ++k) {
        if (std::isnan(row[k]))
            return {row[k], row[k]};
        lowest = row[k] < lowest ? row[k] : lowest;
        highest = row[k] > highest ? row[k] : highest;
    }
    return {lowest, highest};
}

template <typename F> std::int8_t to_code(F x, F scale, F zero_point, const QuantizeRule<F>& rule) {
    const F v = rule.divide ? x / scale : x * (F{1} / scale);
    const F code = rule.round_first ? std::nearbyint(v) + zero_point : std::nearbyint(v + zero_point);
    if (std::isnan(code))
        return 0;
    return static_cast<std::int8_t>(code < rule.low ? rule.low : code > rule.high ? rule.high : code);
}

template <typename F>
void quantize_run(const float* values, std::int64_t count, F scale, F zero_point, const QuantizeRule<F>& rule,
                  std::int8_t* codes) {
    for (std::int64_t k = 0; k < count; ++k)
        codes[k] = to_code(static_cast<F>(values[k]), scale, zero_point, rule);
}

template <typename F>
void quantize_each(const float* values, std::int64_t count, const F* scales, const F* zero_points,
                   const QuantizeRule<F>& rule, std::int8_t* codes) {
    for (std::int64_t k = 0; k < count; ++k)
        codes[k] = to_code(static_cast<F>(values[k]), scales[k], zero_points != nullptr ? zero_points[k] : F{0}, rule);
}

// code - zero_point; where that exceeds 64 bits, the nearest int64, which as a float or double is the same number.
std::int64_t difference(std::int64_t code, std::int64_t zero_point) {
    using Limits = std::numeric_limits<std::int64_t>;
    if (zero_point > 0)
        return code < Limits::min() + zero_point ? Limits::min() : code - zero_point;
    return code > Limits::max() + zero_point ? Limits::max() : code - zero_point;
}

template <typename F> float to_value(std::int64_t code, F scale, std::int64_t zero_point) {
    return static_cast<float>(static_cast<F>(difference(code, zero_point)) * scale);
}

template <typename F> float to_value(std::int64_t code, F scale, float zero_point) {
    return static_cast<float>(static_cast<F>(static_cast<float>(code) - zero_point) * scale);
}

template <typename Q, typename F, typename Zero>
void dequantize_run(const Q* codes, std::int64_t count, F scale, Zero zero_point, bool, float* values) {
    for (std::int64_t k = 0; k < count; ++k)
        values[k] = to_value(codes[k], scale, zero_point);
}

template <typename Q, typename F, typename Zero>
void dequantize_each(const Q* codes, std::int64_t count, const F* scales, const Zero* zero_points, bool,
                     float* values) {
    for (std::int64_t k = 0; k < count; ++k)
        values[k] = to_value(codes[k], scales[k], zero_points != nullptr ? zero_points[k] : Zero{0});
}

template <typename Q, typename F, typename Zero>
constexpr DequantizeKernels<Q, F, Zero> kDequantize{dequantize_run<Q, F, Zero>, dequantize_each<Q, F, Zero>};

void pack(const std::int8_t* codes, std::int64_t count, std::int8_t offset, std::uint8_t* packed) {
    for (std::int64_t k = 0; k < count / 2; ++k)
        packed[k] = static_cast<std::uint8_t>((codes[2 * k] + offset) | ((codes[2 * k + 1] + offset) << 4));
}

} // namespace

float keep_float(float value) {
    return value;
}

RowParameters choose_asymmetric(Extremes extremes, float low, float high, Step step) {
    constexpr float kEpsilon = std::numeric_limits<float>::epsilon();
    float scale = step(step(extremes.highest - extremes.lowest) / (high - low));
    scale = scale < kEpsilon ? kEpsilon : scale;
    const float from_low = step(extremes.lowest / scale), from_high = step(extremes.highest / scale);
    // Zero must be one of the codes; it is measured from the end whose rounding hurts less.
    const bool near_low = step(step(low + from_low) + step(high + from_high)) > 0;
    const float zero_point = step(near_low ? low - from_low : high - from_high);
    if (std::isnan(zero_point))
        return {scale, std::numeric_limits<std::int64_t>::min()};
    const float clamped = zero_point < low ? low : zero_point > high ? high : zero_point;
    return {scale, static_cast<std::int64_t>(std::nearbyint(clamped))};
}

RowParameters choose_symmetric(Extremes extremes, float high, Step step) {
    const float largest = -extremes.lowest > extremes.highest ? -extremes.lowest : extremes.highest;
    const float least = step(1e-5f);
    return {step((largest < least ? least : largest) / high), 0};
}

template <typename Q, typename F> const DequantizeKernels<Q, F, std::int64_t>& wide_dequantize() {
    return kDequantize<Q, F, std::int64_t>;
}
template const DequantizeKernels<std::int8_t, float, std::int64_t>& wide_dequantize<std::int8_t, float>();
template const DequantizeKernels<std::int8_t, double, std::int64_t>& wide_dequantize<std::int8_t, double>();
template const DequantizeKernels<std::uint8_t, float, std::int64_t>& wide_dequantize<std::uint8_t, float>();
template const DequantizeKernels<std::uint8_t, double, std::int64_t>& wide_dequantize<std::uint8_t, double>();

const QuantizationKernels kScalarQuantization{
    extremes,
    {{quantize_run<float>, quantize_each<float>}, {quantize_run<double>, quantize_each<double>}},
    pack,
};

const DequantizationKernels kScalarDequantization{
    {kDequantize<std::int8_t, float, float>, kDequantize<std::int8_t, double, float>,
     kDequantize<std::uint8_t, float, float>, kDequantize<std::uint8_t, double, float>},
    [](const float* from, std::int64_t count, const void*, float* to) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
    },
    [] {},
};

const Kernels kScalarKernels{"scalar", nullptr, &kScalarQuantization, &kScalarDequantization};

} // namespace gr
