// Plain descriptions of checked operands, shared by the code for every instruction set. Functions here have internal
// linkage: this header is compiled with different instruction sets, and the linker must not pick one copy for all.
#pragma once

#include <cstddef>
#include <cstdint>

// For inner loops that are compiled for many element types. Left alone, gcc stops inlining them, and a call for every
// few keys is what decoding then spends its time on.
#if defined(_MSC_VER)
#define GR_ALWAYS_INLINE __forceinline
#else
#define GR_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif

namespace gr {

// Data with strides in elements along B, S, H, D (or along whatever the user says). data NULL: absent.
struct Strided {
    void* data;
    std::int64_t stride[4];
};

// One position per sequence; stride 0: one for all.
struct Positions {
    const std::int64_t* data;
    std::int64_t stride;
};

static inline std::int64_t position(const Positions& positions, std::int64_t batch) {
    return positions.data[batch * positions.stride];
}

template <typename T>
static inline T* at(const Strided& operand, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d = 0) {
    return static_cast<T*>(operand.data) + b * operand.stride[0] + s * operand.stride[1] + h * operand.stride[2] +
           d * operand.stride[3];
}

static inline std::int64_t smaller(std::int64_t a, std::int64_t b) {
    return a < b ? a : b;
}
static inline std::int64_t larger(std::int64_t a, std::int64_t b) {
    return a > b ? a : b;
}
static inline std::int64_t divide_up(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}
static inline std::int64_t round_up(std::int64_t a, std::int64_t b) {
    return divide_up(a, b) * b;
}

} // namespace gr
