// Eight elements in float or double, for code that is the same for both.
#pragma once

#include "vector.h"

namespace gr::avx2 {
namespace {

template <typename F> struct Eight;

template <> struct Eight<float> {
    __m256 x;

    static Eight set1(float x) { return {_mm256_set1_ps(x)}; }
    // The first n <= 8 elements, the others 0.
    static Eight load(const float* p, std::int64_t n) { return {n == 8 ? Avx2::load(p) : Avx2::load(p, n)}; }
    static Eight of(__m256 x) { return {x}; }
    static Eight of(__m256i x) { return {_mm256_cvtepi32_ps(x)}; }

    friend Eight operator+(Eight a, Eight b) { return {_mm256_add_ps(a.x, b.x)}; }
    friend Eight operator-(Eight a, Eight b) { return {_mm256_sub_ps(a.x, b.x)}; }
    friend Eight operator*(Eight a, Eight b) { return {_mm256_mul_ps(a.x, b.x)}; }
    friend Eight operator/(Eight a, Eight b) { return {_mm256_div_ps(a.x, b.x)}; }

    Eight rounded() const { return {_mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    // NaN becomes 0, whatever the limits.
    Eight clamped(Eight low, Eight high) const {
        const __m256 known = _mm256_cmp_ps(x, x, _CMP_ORD_Q);
        return {_mm256_and_ps(_mm256_min_ps(_mm256_max_ps(x, low.x), high.x), known)};
    }
    __m256 floats() const { return x; }
    __m256i ints() const { return _mm256_cvtps_epi32(x); }
};

template <> struct Eight<double> {
    __m256d low, high;

    static Eight set1(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
    static Eight load(const double* p, std::int64_t n) {
        if (n == 8)
            return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)};
        return {n < 4 ? _mm256_maskload_pd(p, first(n)) : _mm256_loadu_pd(p),
                n > 4 ? _mm256_maskload_pd(p + 4, first(n - 4)) : _mm256_setzero_pd()};
    }
    static Eight of(__m256 x) {
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
    }

    friend Eight operator+(Eight a, Eight b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
    friend Eight operator*(Eight a, Eight b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
    friend Eight operator/(Eight a, Eight b) { return {_mm256_div_pd(a.low, b.low), _mm256_div_pd(a.high, b.high)}; }

    Eight rounded() const {
        return {_mm256_round_pd(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_pd(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    Eight clamped(Eight least, Eight largest) const {
        return {clamped(low, least.low, largest.low), clamped(high, least.high, largest.high)};
    }
    __m256 floats() const {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
    }
    __m256i ints() const {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtpd_epi32(low)), _mm256_cvtpd_epi32(high), 1);
    }

private:
    static __m256i first(std::int64_t n) {
        return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
    }
    static __m256d clamped(__m256d x, __m256d least, __m256d largest) {
        const __m256d known = _mm256_cmp_pd(x, x, _CMP_ORD_Q);
        return _mm256_and_pd(_mm256_min_pd(_mm256_max_pd(x, least), largest), known);
    }
};

} // namespace
} // namespace gr::avx2
