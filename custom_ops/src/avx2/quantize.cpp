// Per-token quantization for AVX2: the same operations in the same order as ../quantize_reference.cpp, without
// contraction.
#include "quantize.h"

#include <immintrin.h>

#include "../quantize.h"
#include "vector.h"

namespace gr::avx2 {
namespace {

constexpr std::int64_t kWidth = 8;

struct Extremes {
    float lowest, highest; // with 0 among the elements; NaN when one is
};

Extremes extremes(const float* row, std::int64_t dim) {
    __m256 lowest = _mm256_setzero_ps(), highest = lowest, unordered = lowest;
    const auto take = [&](__m256 x) {
        lowest = _mm256_min_ps(x, lowest); // the second one where the first is NaN
        highest = _mm256_max_ps(x, highest);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    };
    std::int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth)
        take(_mm256_loadu_ps(row + d));
    if (d < dim)
        take(Avx2::load(row + d, dim - d));
    if (_mm256_movemask_ps(unordered) != 0) {
        const float nan = _mm256_cvtss_f32(_mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));
        return {nan, nan};
    }
    return {-Avx2::max(_mm256_sub_ps(_mm256_setzero_ps(), lowest)), Avx2::max(highest)};
}

// Clamped to a code's range, 0 where x is NaN.
__m128i to_int32(__m256d x) {
    const __m256d known = _mm256_and_pd(x, _mm256_cmp_pd(x, x, _CMP_ORD_Q));
    const __m256d clamped = _mm256_min_pd(_mm256_max_pd(known, _mm256_set1_pd(-128.0)), _mm256_set1_pd(127.0));
    return _mm256_cvtpd_epi32(clamped);
}

__m256i to_int32(__m256 x) {
    const __m256 known = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    const __m256 clamped = _mm256_min_ps(_mm256_max_ps(known, _mm256_set1_ps(-128.0f)), _mm256_set1_ps(127.0f));
    return _mm256_cvtps_epi32(clamped);
}

// The low bytes of two times four int32 in the range of a byte.
std::uint64_t to_bytes(__m128i low, __m128i high) {
    const __m128i words = _mm_packs_epi32(low, high);
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_packs_epi16(words, words)));
}

void store_bytes(std::int8_t* p, std::uint64_t bytes, std::int64_t count) {
    for (std::int64_t k = 0; k < count; ++k)
        p[k] = static_cast<std::int8_t>(bytes >> (8 * k));
}

// Stores eight codes at a time, and at the end those that are left. `convert`: 8 floats to 8 codes.
template <typename Convert> void convert_row(const float* row, std::int64_t dim, std::int8_t* codes, Convert convert) {
    std::int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
        const std::uint64_t bytes = convert(_mm256_loadu_ps(row + d));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + d), _mm_cvtsi64_si128(static_cast<long long>(bytes)));
    }
    if (d < dim)
        store_bytes(codes + d, convert(Avx2::load(row + d, dim - d)), dim - d);
}

} // namespace

void quantize_asymmetric(const float* row, std::int64_t dim, std::int8_t* codes, float* scale,
                         std::int8_t* zero_point) {
    const Extremes range = extremes(row, dim);
    const AsymmetricParameters parameters = choose_asymmetric(range.lowest, range.highest);
    *scale = parameters.scale;
    *zero_point = parameters.zero_point;
    const __m256d inverse = _mm256_set1_pd(parameters.inverse_scale), shift = _mm256_set1_pd(parameters.shift);
    const auto quantize = [&](__m128 x) {
        const __m256d scaled = _mm256_add_pd(_mm256_mul_pd(_mm256_cvtps_pd(x), inverse), shift);
        return to_int32(_mm256_round_pd(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    };
    convert_row(row, dim, codes, [&](__m256 x) {
        return to_bytes(quantize(_mm256_castps256_ps128(x)), quantize(_mm256_extractf128_ps(x, 1)));
    });
}

void quantize_symmetric(const float* row, std::int64_t dim, std::int8_t* codes, float* scale, std::int8_t* zero_point) {
    const Extremes range = extremes(row, dim);
    const float largest = range.highest > -range.lowest ? range.highest : -range.lowest;
    const SymmetricParameters parameters = choose_symmetric(largest);
    *scale = parameters.scale;
    *zero_point = 0;
    const __m256 inverse = _mm256_set1_ps(parameters.inverse_scale);
    convert_row(row, dim, codes, [&](__m256 x) {
        const __m256 scaled = _mm256_mul_ps(x, inverse);
        const __m256i wide = to_int32(_mm256_round_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        return to_bytes(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    });
}

} // namespace gr::avx2
