// Vectors of 16 floats, for the kernels in ../simd, which are written against this interface. See ../avx2/vector.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace gr {

struct Avx512 {
    static constexpr std::int64_t kWidth = 16;
    static constexpr int kTileRows = 12;          // 12 x 2 accumulators, 2 columns and a broadcast fit in 32 registers
    static constexpr int kSums = 16;              // what `sums` takes at most
    static constexpr int kSlice[] = {8, 8, 4, 4}; // vectors of the head size that 1 to 4 rows are summed in at once

    using Floats = __m512;
    using Ints = __m512i;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats set1(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    // b where a is NaN.
    static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }

    static Ints set1(std::int32_t x) { return _mm512_set1_epi32(x); }

    // The first n lanes, 0 <= n < 16.
    static __mmask16 first(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
    // Reads or writes n elements and nothing behind them; the other lanes are 0.
    static Floats load(const float* p, std::int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static void store(float* p, Floats x, std::int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }

    // Elements of a cache as floats: floats as they are, codes less their zero point.
    static Floats values(const float* p, Ints) { return load(p); }
    static Floats values(const float* p, Ints, std::int64_t n) { return load(p, n); }
    static Floats values(const std::int8_t* p, Ints zero_point) {
        return difference(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), zero_point);
    }
    static Floats values(const std::int8_t* p, Ints zero_point, std::int64_t n) {
        return difference(_mm_maskz_loadu_epi8(first(n), p), zero_point);
    }

    // x where `condition` is not 0, else y.
    static Floats where_nonzero(Floats condition, Floats x, Floats y) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(condition, zero(), _CMP_NEQ_UQ), y, x);
    }
    // x, but y where the byte is 0.
    static Floats where_byte(const std::uint8_t* bytes, Floats x, Floats y) {
        const __m128i wide = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
        return _mm512_mask_blend_ps(_mm_test_epi8_mask(wide, wide), y, x);
    }
    // x + bias, but `hidden` where that is the bias.
    static Floats add_bias(Floats x, Floats bias, Floats hidden) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(bias, hidden, _CMP_EQ_OQ), add(x, bias), hidden);
    }
    static bool any_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }

    static float sum(Floats x) { return _mm512_reduce_add_ps(x); }
    static float max(Floats x) { return _mm512_reduce_max_ps(x); }
    // The sums of Count <= 16 vectors, in order.
    template <int Count> static void sums(const Floats* x, float* out) {
        const auto pick = [&](int k) { return k < Count ? x[k] : zero(); };
        const auto pair = [&](int k) {
            return add(_mm512_unpacklo_ps(pick(k), pick(k + 1)), _mm512_unpackhi_ps(pick(k), pick(k + 1)));
        };
        // In every quarter, what the four vectors from k on have there.
        const auto quarters = [&](int k) {
            const __m512d low = _mm512_castps_pd(pair(k)), high = _mm512_castps_pd(pair(k + 2));
            return add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
        };
        const auto halves = [&](int k) {
            const Floats low = quarters(k), high = quarters(k + 4);
            return add(_mm512_shuffle_f32x4(low, high, 0x44), _mm512_shuffle_f32x4(low, high, 0xEE));
        };
        const Floats low = halves(0), high = halves(8);
        store(out, add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD)));
    }

    // As in ../avx2/vector.h, operation by operation.
    static Floats exp(Floats x) {
        const Floats n = _mm512_roundscale_ps(mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const Floats r = _mm512_fnmadd_ps(n, set1(1.4286068e-06f), _mm512_fnmadd_ps(n, set1(0.69314575f), x));
        Floats q = set1(0.0013814599f);
        q = fma(q, r, set1(0.008368717f));
        q = fma(q, r, set1(0.04166839f));
        q = fma(q, r, set1(0.16666521f));
        q = fma(q, r, set1(0.49999994f));
        const Floats fraction = add(fma(mul(r, r), q, r), set1(1.0f));
        const Ints exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), set1(127)), 23);
        return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, set1(-87.33654f), _CMP_NLT_UQ), fraction,
                                   _mm512_castsi512_ps(exponent));
    }
    static float exp(float x) { return _mm512_cvtss_f32(exp(set1(x))); }

    static void prefetch(const void* p) {
#if defined(__GNUC__)
        // gcc takes a function that does nothing but prefetch for one without effect, and drops its calls.
        __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
#else
        _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
#endif
    }

private:
    static Floats difference(__m128i codes, Ints zero_point) {
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepi8_epi32(codes), zero_point));
    }
};

} // namespace gr
