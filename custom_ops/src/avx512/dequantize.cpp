// Dequantization for AVX-512 (F, BW, VL, DQ). Compiled for it, and so entered only where the processor has it.
#include "dequantize.h"

#include <type_traits>

#include "../simd/dequantize.h"

namespace gr::avx512 {
namespace {

std::uint32_t first(std::int64_t n) {
    return n <= 0 ? 0 : (1u << n) - 1;
}

template <typename Q> __m512i load_integers(const Q* codes, std::int64_t n) {
    const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>(first(n)), codes);
    return std::is_signed_v<Q> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
}

void store_line(float* to, __m512 x, std::int64_t n) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(first(n)), x);
}

template <typename F> struct Sixteen;

template <> struct Sixteen<float> {
    __m512 x;

    static Sixteen set1(float x) { return {_mm512_set1_ps(x)}; }
    static Sixteen load(const float* p, std::int64_t n) {
        return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(first(n)), p)};
    }
    template <typename Q> static Sixteen load_codes(const Q* codes, std::int64_t n) {
        return {_mm512_cvtepi32_ps(load_integers(codes, n))};
    }
    static Sixteen of(Sixteen x) { return x; }

    friend Sixteen operator-(Sixteen a, Sixteen b) { return {_mm512_sub_ps(a.x, b.x)}; }
    friend Sixteen operator*(Sixteen a, Sixteen b) { return {_mm512_mul_ps(a.x, b.x)}; }

    void store(float* to, std::int64_t n) const { store_line(to, x, n); }
    void stream(float* to) const { _mm512_stream_ps(to, x); }
};

template <> struct Sixteen<double> {
    __m512d low, high;

    static Sixteen set1(double x) { return {_mm512_set1_pd(x), _mm512_set1_pd(x)}; }
    static Sixteen load(const double* p, std::int64_t n) {
        return {_mm512_maskz_loadu_pd(static_cast<__mmask8>(first(smaller(n, 8))), p),
                _mm512_maskz_loadu_pd(static_cast<__mmask8>(first(n - 8)), p + 8)};
    }
    static Sixteen of(Sixteen<float> x) {
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(x.x)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.x, 1))};
    }

    friend Sixteen operator*(Sixteen a, Sixteen b) {
        return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)};
    }

    __m512 floats() const {
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
    }
    void store(float* to, std::int64_t n) const { store_line(to, floats(), n); }
    void stream(float* to) const { _mm512_stream_ps(to, floats()); }
};

} // namespace

const DequantizationKernels kDequantization = simd::Dequantize<Sixteen>::all();

} // namespace gr::avx512
