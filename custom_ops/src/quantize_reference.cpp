// Per-token quantization with the numerics of torch's quantized_decomposed operators:
//   asymmetric  choose_qparams_per_token_asymmetric in float32, quantize_per_token in float64 (its scales are float64)
//   symmetric   choose_qparams_per_token and quantize_per_token, both in float32
// This file is compiled without contraction of a * b + c, which would round once where torch rounds twice.
#include <cmath>

#include "isa.h"
#include "quantize.h"

namespace gr {
namespace {

// A float to an integer code. torch converts NaN, which no clamp changes, to 0.
template <typename T> std::int8_t to_code(T rounded) {
    if (std::isnan(rounded))
        return 0;
    return static_cast<std::int8_t>(rounded < T{-128} ? T{-128} : rounded > T{127} ? T{127} : rounded);
}

void quantize_asymmetric(const float* row, std::int64_t dim, std::int8_t* codes, float* scale,
                         std::int8_t* zero_point) {
    float lowest = 0, highest = 0;
    for (std::int64_t d = 0; d < dim; ++d) {
        // A comparison with NaN is false, so NaN is taken and kept.
        lowest = !(row[d] >= lowest) && !std::isnan(lowest) ? row[d] : lowest;
        highest = !(row[d] <= highest) && !std::isnan(highest) ? row[d] : highest;
    }
    const AsymmetricParameters parameters = choose_asymmetric(lowest, highest);
    *scale = parameters.scale;
    *zero_point = parameters.zero_point;
    for (std::int64_t d = 0; d < dim; ++d)
        codes[d] = to_code(std::nearbyint(row[d] * parameters.inverse_scale + parameters.shift));
}

void quantize_symmetric(const float* row, std::int64_t dim, std::int8_t* codes, float* scale, std::int8_t* zero_point) {
    float largest = 0;
    for (std::int64_t d = 0; d < dim; ++d)
        largest = !(std::fabs(row[d]) <= largest) && !std::isnan(largest) ? std::fabs(row[d]) : largest;
    const SymmetricParameters parameters = choose_symmetric(largest);
    *scale = parameters.scale;
    *zero_point = 0;
    for (std::int64_t d = 0; d < dim; ++d)
        codes[d] = to_code(std::nearbyint(row[d] * parameters.inverse_scale));
}

} // namespace

AsymmetricParameters choose_asymmetric(float lowest, float highest) {
    constexpr float kEpsilon = 1.1920928955078125e-07f;
    float scale = (highest - lowest) / 255.0f;
    scale = scale < kEpsilon ? kEpsilon : scale;
    const float low = lowest / scale, high = highest / scale;
    // Zero must be one of the codes; it is measured from the end whose rounding hurts less.
    const float zero = (-128.0f + low) + (127.0f + high) > 0 ? -128.0f - low : 127.0f - high;
    AsymmetricParameters parameters{scale, 1.0 / static_cast<double>(scale), 0, 0};
    if (std::isnan(zero)) {
        // torch holds the zero point as int64, and NaN becomes the least one there.
        parameters.shift = -9223372036854775808.0;
        return parameters;
    }
    parameters.shift = std::nearbyint(zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero);
    parameters.zero_point = static_cast<std::int8_t>(parameters.shift);
    return parameters;
}

SymmetricParameters choose_symmetric(float largest) {
    const float scale = (largest < 1e-5f ? 1e-5f : largest) / 127.0f;
    return {scale, 1.0f / scale};
}

const Kernels kScalarKernels{"scalar", nullptr, quantize_asymmetric, quantize_symmetric};

} // namespace gr
