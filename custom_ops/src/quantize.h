// The arithmetic of quantization: what the kernels of an instruction set compute for runs of elements, and the scale
// and zero point of one row. The numerics are those of torch's quantized_decomposed operators, bit for bit.
#pragma once

#include <cstdint>
#include <tuple>

namespace gr {

// How a value x becomes a code, with all arithmetic in F and ties rounded to even:
//     v = x * (1 / scale), or x / scale where `divide`
//     code = clamp(round(v + zero_point), low, high), or
//            clamp(round(v) + zero_point, low, high) where `round_first`
// A NaN there gives code 0, as torch's conversion of NaN to an integer does.
template <typename F> struct QuantizeRule {
    F low, high; // within [-128, 127]
    bool round_first, divide;
};

template <typename F> struct QuantizeKernels {
    // One scale and zero point for `count` elements.
    void (*run)(const float* values, std::int64_t count, F scale, F zero_point, const QuantizeRule<F>& rule,
                std::int8_t* codes);
    // For each element its own. `zero_points` NULL: 0.
    void (*each)(const float* values, std::int64_t count, const F* scales, const F* zero_points,
                 const QuantizeRule<F>& rule, std::int8_t* codes);
};

// float((code - zero_point) * scale), with the difference exact and the product in F. Zero is float, for zero points up
// to kLargestNarrowZeroPoint in magnitude, or int64. `stream`: the values are not read again soon, and go past the
// caches where the processor can; other threads see them after finish_streams().
template <typename Q, typename F, typename Zero> struct DequantizeKernels {
    void (*run)(const Q* codes, std::int64_t count, F scale, Zero zero_point, bool stream, float* values);
    // `zero_points` NULL: 0.
    void (*each)(const Q* codes, std::int64_t count, const F* scales, const Zero* zero_points, bool stream,
                 float* values);
};

constexpr std::int64_t kLargestNarrowZeroPoint = std::int64_t{1} << 23;

// The least and the largest of a row and 0; both NaN when the row has one.
struct Extremes {
    float lowest, highest;
};

// The kernels of one instruction set.
struct QuantizationKernels {
    Extremes (*extremes)(const float* row, std::int64_t count);
    std::tuple<QuantizeKernels<float>, QuantizeKernels<double>> quantizers;
    // int4: packed[k] = (codes[2k] + offset) | (codes[2k + 1] + offset) << 4, with the sums in 0..15. `count` is even.
    void (*pack)(const std::int8_t* codes, std::int64_t count, std::int8_t offset, std::uint8_t* packed);

    template <typename F> const QuantizeKernels<F>& quantize() const {
        return std::get<QuantizeKernels<F>>(quantizers);
    }
};

struct DequantizationKernels {
    std::tuple<DequantizeKernels<std::int8_t, float, float>, DequantizeKernels<std::int8_t, double, float>,
               DequantizeKernels<std::uint8_t, float, float>, DequantizeKernels<std::uint8_t, double, float>>
        dequantizers;
    // Streams values that were computed elsewhere, from `codes` on.
    void (*stream)(const float* from, std::int64_t count, const void* codes, float* to);
    void (*finish_streams)();

    template <typename Q, typename F> const DequantizeKernels<Q, F, float>& dequantize() const {
        return std::get<DequantizeKernels<Q, F, float>>(dequantizers);
    }
};

extern const QuantizationKernels kScalarQuantization;
extern const DequantizationKernels kScalarDequantization;

// Zero points of any size, for every instruction set.
template <typename Q, typename F> const DequantizeKernels<Q, F, std::int64_t>& wide_dequantize();

struct RowParameters {
    float scale;
    std::int64_t zero_point; // the least int64 where a NaN was rounded, as in torch
};

// Rounds a float to the type in which torch computes, after every step.
using Step = float (*)(float);
float keep_float(float value);

// For codes low..high. choose_qparams_per_token_asymmetric, whose codes are -128..127.
RowParameters choose_asymmetric(Extremes extremes, float low, float high, Step step = keep_float);

// For codes up to `high`, which is 127 in choose_qparams_per_token.
RowParameters choose_symmetric(Extremes extremes, float high, Step step = keep_float);

} // namespace gr
