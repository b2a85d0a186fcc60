// Unpacks blocks of keys: 16 rows, dequantized to floats and transposed, so that one vector holds one element of
// several keys.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace gr::avx2 {

// Transposes 16 x 16 bytes: four rounds of interleaving rows k and k + 8.
static inline void transpose_bytes(__m128i (&x)[16]) {
    for (int round = 0; round < 4; ++round) {
        __m128i y[16];
        for (int k = 0; k < 8; ++k) {
            y[2 * k] = _mm_unpacklo_epi8(x[k], x[k + 8]);
            y[2 * k + 1] = _mm_unpackhi_epi8(x[k], x[k + 8]);
        }
        for (int k = 0; k < 16; ++k)
            x[k] = y[k];
    }
}

static inline __m128i load_bytes(const std::int8_t* p, std::int64_t n) {
    if (n >= 16)
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    alignas(16) std::int8_t bytes[16] = {};
    for (std::int64_t k = 0; k < n; ++k)
        bytes[k] = p[k];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

static inline __m256 dequantize(__m128i codes, __m256i zero_points, __m256 scales) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepi8_epi32(codes), zero_points)), scales);
}

// out[d * pitch + k] = (row[k * stride + d] - zero_points[k]) * scales[k], k < 16; keys from `keys` on are 0. `scales`
// and `zero_points` have 16 elements.
static inline void pack_keys(const std::int8_t* row, std::int64_t stride, std::int64_t keys, const float* scales,
                             const std::int32_t* zero_points, std::int64_t dim, float* out, std::int64_t pitch) {
    const __m256 scale[2] = {_mm256_loadu_ps(scales), _mm256_loadu_ps(scales + 8)};
    const __m256i zero[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(zero_points)),
                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(zero_points + 8))};
    for (std::int64_t d = 0; d < dim; d += 16) {
        __m128i codes[16];
        for (std::int64_t k = 0; k < 16; ++k)
            codes[k] = k < keys ? load_bytes(row + k * stride + d, dim - d) : _mm_setzero_si128();
        transpose_bytes(codes);
        const std::int64_t count = dim - d < 16 ? dim - d : 16;
        for (std::int64_t k = 0; k < count; ++k) {
            float* target = out + (d + k) * pitch;
            _mm256_storeu_ps(target, dequantize(codes[k], zero[0], scale[0]));
            _mm256_storeu_ps(target + 8, dequantize(_mm_srli_si128(codes[k], 8), zero[1], scale[1]));
        }
    }
}

static inline void transpose_floats(__m256 (&x)[8]) {
    __m256 y[8];
    for (int k = 0; k < 4; ++k) {
        y[2 * k] = _mm256_unpacklo_ps(x[2 * k], x[2 * k + 1]);
        y[2 * k + 1] = _mm256_unpackhi_ps(x[2 * k], x[2 * k + 1]);
    }
    for (int k = 0; k < 2; ++k) {
        x[4 * k] = _mm256_shuffle_ps(y[4 * k], y[4 * k + 2], 0x44);
        x[4 * k + 1] = _mm256_shuffle_ps(y[4 * k], y[4 * k + 2], 0xEE);
        x[4 * k + 2] = _mm256_shuffle_ps(y[4 * k + 1], y[4 * k + 3], 0x44);
        x[4 * k + 3] = _mm256_shuffle_ps(y[4 * k + 1], y[4 * k + 3], 0xEE);
    }
    for (int k = 0; k < 4; ++k) {
        y[k] = _mm256_permute2f128_ps(x[k], x[k + 4], 0x20);
        y[k + 4] = _mm256_permute2f128_ps(x[k], x[k + 4], 0x31);
    }
    for (int k = 0; k < 8; ++k)
        x[k] = y[k];
}

// The same for float rows, which have neither scales nor zero points.
static inline void pack_keys(const float* row, std::int64_t stride, std::int64_t keys, const float*,
                             const std::int32_t*, std::int64_t dim, float* out, std::int64_t pitch) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (std::int64_t d = 0; d < dim; d += 8) {
        const std::int64_t count = dim - d < 8 ? dim - d : 8;
        const __m256i present = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
        for (std::int64_t half = 0; half < 16; half += 8) {
            __m256 x[8];
            for (std::int64_t k = 0; k < 8; ++k)
                x[k] =
                    half + k < keys ? _mm256_maskload_ps(row + (half + k) * stride + d, present) : _mm256_setzero_ps();
            transpose_floats(x);
            for (std::int64_t k = 0; k < count; ++k)
                _mm256_storeu_ps(out + (d + k) * pitch + half, x[k]);
        }
    }
}

// Both for the vectors of an instruction set. Without linkage, like everything here: instruction sets beyond AVX2
// compile it for themselves.
namespace {

struct Pack {
    static constexpr std::int64_t kPackedKeys = 16;

    template <typename Element>
    static void pack_keys(const Element* row, std::int64_t stride, std::int64_t keys, const float* scales,
                          const std::int32_t* zero_points, std::int64_t dim, float* out, std::int64_t pitch) {
        avx2::pack_keys(row, stride, keys, scales, zero_points, dim, out, pitch);
    }
};

} // namespace

} // namespace gr::avx2
