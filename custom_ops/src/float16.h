// float16 and bfloat16 as bits: widening is exact, narrowing rounds to nearest even. Functions have internal linkage:
// see operands.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace gr {

static inline float float_of_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline std::uint32_t bits_of_float(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bfloat16_to_float(std::uint16_t half) {
    return float_of_bits(static_cast<std::uint32_t>(half) << 16);
}

static inline std::uint16_t float_to_bfloat16(float value) {
    const std::uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return static_cast<std::uint16_t>(bits >> 16 | 0x40); // a NaN stays one
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Without branches, so that compilers turn loops over it into vector code.
static inline float float16_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fffu;
    // Subnormal numbers are magnitude * 2^-24, exactly.
    const std::uint32_t subnormal = bits_of_float(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t special = (magnitude << 13) | 0x7f800000u;
    const std::uint32_t finite = magnitude < 0x400 ? subnormal : normal;
    return float_of_bits(sign | (magnitude < 0x7c00 ? finite : special));
}

static inline std::uint16_t float_to_float16(float value) {
    const std::uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000u)
        return static_cast<std::uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) // rounds past the largest finite number, 65504
        return static_cast<std::uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000u) {
        // Subnormal: in the sum with 0.5 the last bit of the fraction is worth 2^-24, so the addition rounds.
        const std::uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f);
        return static_cast<std::uint16_t>(sign | (rounded - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23);
    return static_cast<std::uint16_t>(sign | rounded >> 13);
}

} // namespace gr
