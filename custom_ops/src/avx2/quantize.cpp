// Quantization for AVX2: the same operations in the same order as ../quantize_reference.cpp, without contraction.
#include "quantize.h"

#include <immintrin.h>

#include "eight.h"
#include "vector.h"

namespace gr::avx2 {
namespace {

constexpr std::int64_t kWidth = 8;

Extremes extremes(const float* row, std::int64_t count) {
    __m256 lowest = _mm256_setzero_ps(), highest = lowest, unordered = lowest;
    const auto take = [&](__m256 x) {
        lowest = _mm256_min_ps(x, lowest); // the second one where the first is NaN
        highest = _mm256_max_ps(x, highest);
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    };
    std::int64_t k = 0;
    for (; k + kWidth <= count; k += kWidth)
        take(_mm256_loadu_ps(row + k));
    if (k < count)
        take(Avx2::load(row + k, count - k));
    if (_mm256_movemask_ps(unordered) != 0) {
        const float nan = _mm256_cvtss_f32(_mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));
        return {nan, nan};
    }
    return {-Avx2::max(_mm256_sub_ps(_mm256_setzero_ps(), lowest)), Avx2::max(highest)};
}

template <typename F> struct Rule {
    Eight<F> low, high;
    bool round_first, divide;

    explicit Rule(const QuantizeRule<F>& rule)
        : low(Eight<F>::set1(rule.low)), high(Eight<F>::set1(rule.high)), round_first(rule.round_first),
          divide(rule.divide) {}

    // Eight codes, the first one in the lowest byte.
    std::uint64_t codes(Eight<F> scaled, Eight<F> zero_point) const {
        const Eight<F> code = round_first ? scaled.rounded() + zero_point : (scaled + zero_point).rounded();
        const __m256i wide = code.clamped(low, high).ints();
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
        return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_packs_epi16(words, words)));
    }
};

// Stores eight codes at a time, and at the end those that are left. `convert(k, n)`: the codes of n elements from k on.
template <typename Convert> void store_codes(std::int64_t count, std::int8_t* codes, Convert convert) {
    std::int64_t k = 0;
    for (; k + kWidth <= count; k += kWidth) {
        const __m128i eight = _mm_cvtsi64_si128(static_cast<long long>(convert(k, kWidth)));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + k), eight);
    }
    if (k < count)
        for (std::uint64_t rest = convert(k, count - k); k < count; ++k, rest >>= 8)
            codes[k] = static_cast<std::int8_t>(rest);
}

template <typename F> Eight<F> load_values(const float* values, std::int64_t n) {
    return Eight<F>::of(Eight<float>::load(values, n).x);
}

template <typename F>
void quantize_run(const float* values, std::int64_t count, F scale, F zero_point, const QuantizeRule<F>& rule,
                  std::int8_t* codes) {
    const Rule<F> vector_rule(rule);
    const Eight<F> zero = Eight<F>::set1(zero_point);
    if (rule.divide) {
        const Eight<F> divisor = Eight<F>::set1(scale);
        store_codes(count, codes, [&](std::int64_t k, std::int64_t n) {
            return vector_rule.codes(load_values<F>(values + k, n) / divisor, zero);
        });
    } else {
        const Eight<F> factor = Eight<F>::set1(F{1} / scale);
        store_codes(count, codes, [&](std::int64_t k, std::int64_t n) {
            return vector_rule.codes(load_values<F>(values + k, n) * factor, zero);
        });
    }
}

template <typename F>
void quantize_each(const float* values, std::int64_t count, const F* scales, const F* zero_points,
                   const QuantizeRule<F>& rule, std::int8_t* codes) {
    const Rule<F> vector_rule(rule);
    const Eight<F> zero = Eight<F>::set1(0), one = Eight<F>::set1(1);
    store_codes(count, codes, [&](std::int64_t k, std::int64_t n) {
        const Eight<F> value = load_values<F>(values + k, n), scale = Eight<F>::load(scales + k, n);
        return vector_rule.codes(rule.divide ? value / scale : value * (one / scale),
                                 zero_points != nullptr ? Eight<F>::load(zero_points + k, n) : zero);
    });
}

// With the low one of two codes times 1 and the other times 16, their sum is the byte.
void pack(const std::int8_t* codes, std::int64_t count, std::int8_t offset, std::uint8_t* packed) {
    const __m256i shift = _mm256_set1_epi8(offset), weights = _mm256_set1_epi16(0x1001);
    std::int64_t k = 0;
    for (; k + 32 <= count; k += 32) {
        const __m256i nibbles = _mm256_add_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + k)), shift);
        const __m256i words = _mm256_maddubs_epi16(nibbles, weights);
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + k / 2), bytes);
    }
    kScalarQuantization.pack(codes + k, count - k, offset, packed + k / 2);
}

} // namespace

const QuantizationKernels kQuantization{
    extremes,
    {{quantize_run<float>, quantize_each<float>}, {quantize_run<double>, quantize_each<double>}},
    pack,
};

} // namespace gr::avx2
