// The parameters of one quantized row, from its extremes.
#pragma once

#include <cstdint>

namespace gr {

struct AsymmetricParameters {
    float scale;
    double inverse_scale; // 1 / scale in float64
    double shift;         // the zero point that is added before rounding
    std::int8_t zero_point;
};

struct SymmetricParameters {
    float scale, inverse_scale;
};

// `lowest` <= 0 <= `highest`, or NaN.
AsymmetricParameters choose_asymmetric(float lowest, float highest);

// `largest`: the largest magnitude, or NaN.
SymmetricParameters choose_symmetric(float largest);

} // namespace gr
