// Dequantization for AVX2. Compiled for it, and so entered only where the processor has it.
#include "../simd/dequantize.h"

#include <cstring>
#include <type_traits>

#include "eight.h"
#include "quantize.h"

namespace gr::avx2 {
namespace {

// The first n <= 8 codes.
template <typename Q> __m256i load_eight(const Q* codes, std::int64_t n) {
    std::int64_t bytes = 0;
    std::memcpy(&bytes, codes, n == 8 ? sizeof bytes : static_cast<std::size_t>(n));
    const __m128i packed = _mm_cvtsi64_si128(bytes);
    return std::is_signed_v<Q> ? _mm256_cvtepi8_epi32(packed) : _mm256_cvtepu8_epi32(packed);
}

template <typename F> struct Sixteen {
    Eight<F> low, high;

    static Sixteen set1(F x) { return {Eight<F>::set1(x), Eight<F>::set1(x)}; }
    static Sixteen load(const F* p, std::int64_t n) {
        return {Eight<F>::load(p, smaller(n, 8)), Eight<F>::load(p + 8, larger(n - 8, 0))};
    }
    template <typename Q> static Sixteen load_codes(const Q* codes, std::int64_t n) {
        return {Eight<F>::of(load_eight(codes, smaller(n, 8))), Eight<F>::of(load_eight(codes + 8, larger(n - 8, 0)))};
    }
    static Sixteen of(Sixteen<float> x) { return {Eight<F>::of(x.low.x), Eight<F>::of(x.high.x)}; }

    friend Sixteen operator-(Sixteen a, Sixteen b) { return {a.low - b.low, a.high - b.high}; }
    friend Sixteen operator*(Sixteen a, Sixteen b) { return {a.low * b.low, a.high * b.high}; }

    void store(float* to, std::int64_t n) const {
        if (n >= 8)
            Avx2::store(to, low.floats());
        else
            Avx2::store(to, low.floats(), n);
        if (n == 16)
            Avx2::store(to + 8, high.floats());
        else if (n > 8)
            Avx2::store(to + 8, high.floats(), n - 8);
    }
    // Both halves of the line are computed before the first is written: a line that is only half written for a while
    // costs a transfer of its own.
    void stream(float* to) const {
        const __m256 halves[] = {low.floats(), high.floats()};
        _mm256_stream_ps(to, halves[0]);
        _mm256_stream_ps(to + 8, halves[1]);
    }
};

} // namespace

const DequantizationKernels kDequantization = simd::Dequantize<Sixteen>::all();

} // namespace gr::avx2
