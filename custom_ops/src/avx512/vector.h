// Vectors of 16 floats, for the kernels in ../simd, which are written against this interface. See ../avx2/vector.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../attention.h"

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
    static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    // b where a is NaN.
    static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }

    static Ints set1(std::int32_t x) { return _mm512_set1_epi32(x); }

    // The first n lanes, 0 <= n < 16.
    static __mmask16 first(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
    // Reads or writes n elements and nothing behind them; the other lanes are 0.
    static Floats load(const float* p, std::int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static void store(float* p, Floats x, std::int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }

    template <typename T> static void store(T* p, Floats x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(p, x));
    }
    template <typename T> static void store(T* p, Floats x, std::int64_t n) {
        _mm256_mask_storeu_epi16(p, first(n), narrow(p, x));
    }

    // Elements as floats: codes less the zero point, others as they are.
    static Floats values(const float* p, Ints) { return load(p); }
    static Floats values(const float* p, Ints, std::int64_t n) { return load(p, n); }
    static Floats values(const Half* p, Ints) { return _mm512_cvtph_ps(load32(p)); }
    static Floats values(const Half* p, Ints, std::int64_t n) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
    }
    static Floats values(const BFloat* p, Ints) { return widen(load32(p)); }
    static Floats values(const BFloat* p, Ints, std::int64_t n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
    static Floats values(const std::int8_t* p, Ints zero_point) {
        return difference(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), zero_point);
    }
    static Floats values(const std::int8_t* p, Ints zero_point, std::int64_t n) {
        return difference(_mm_maskz_loadu_epi8(first(n), p), zero_point);
    }

    // Int4 codes as floats, n of them.
    static Floats codes(const Int4Pair* p) { return codes(load_pairs(p)); }
    static Floats codes(const Int4Pair* p, std::int64_t n) { return codes(load_pairs(p, n)); }

    // Int4 codes that share scale and zero point: their values, which are looked up.
    class PairGroup {
    public:
        PairGroup(std::int32_t zero_point, float scale)
            : values_(mul(sub(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                              set1(static_cast<float>(zero_point))),
                          set1(scale))) {}
        // The low 4 bits of an index count.
        Floats operator()(const Int4Pair* p) const { return _mm512_permutexvar_ps(nibbles(load_pairs(p)), values_); }
        Floats operator()(const Int4Pair* p, std::int64_t n) const {
            return _mm512_permutexvar_ps(nibbles(load_pairs(p, n)), values_);
        }

    private:
        Floats values_; // of codes 0 to 15
    };

    static Floats abs(Floats x) { return _mm512_abs_ps(x); }
    // x >= 0 with the sign of y.
    static Floats with_sign(Floats x, Floats y) { return _mm512_or_ps(x, _mm512_and_ps(set1(-0.0f), y)); }
    // x where a < b, else y.
    static Floats where_less(Floats a, Floats b, Floats x, Floats y) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
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
    template <int Count> static GR_ALWAYS_INLINE void sums(const Floats* x, float* out) {
        const Floats low = halves<Count, 0>(x), high = halves<Count, 8>(x);
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
    // Steps of `sums`: the vector number K, two of them added in pairs of elements, four in every quarter, eight in
    // every half.
    template <int Count, int K> static GR_ALWAYS_INLINE Floats pick(const Floats* x) {
        if constexpr (K < Count)
            return x[K];
        else
            return zero();
    }
    template <int Count, int K> static GR_ALWAYS_INLINE __m512d pairs(const Floats* x) {
        const Floats first = pick<Count, K>(x), second = pick<Count, K + 1>(x);
        return _mm512_castps_pd(add(_mm512_unpacklo_ps(first, second), _mm512_unpackhi_ps(first, second)));
    }
    template <int Count, int K> static GR_ALWAYS_INLINE Floats quarters(const Floats* x) {
        const __m512d low = pairs<Count, K>(x), high = pairs<Count, K + 2>(x);
        return add(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    template <int Count, int K> static GR_ALWAYS_INLINE Floats halves(const Floats* x) {
        const Floats low = quarters<Count, K>(x), high = quarters<Count, K + 4>(x);
        return add(_mm512_shuffle_f32x4(low, high, 0x44), _mm512_shuffle_f32x4(low, high, 0xEE));
    }

    template <typename T> static __m256i load32(const T* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static __m128i load_pairs(const Int4Pair* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
    static __m128i load_pairs(const Int4Pair* p, std::int64_t n) {
        return _mm_maskz_loadu_epi8(first(divide_up(n, 2)), p);
    }
    static Floats widen(__m256i halves) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static Floats difference(__m128i codes, Ints zero_point) {
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepi8_epi32(codes), zero_point));
    }
    // Each byte in 64 bits: its low half is in the lower 32 of them, and shifted by 28 its high half in the upper ones.
    // The bits above the low 4 are of no use.
    static __m512i nibbles(__m128i pairs) {
        const __m512i wide = _mm512_cvtepu8_epi64(pairs);
        return _mm512_or_si512(wide, _mm512_slli_epi64(wide, 28));
    }
    static Floats codes(__m128i pairs) {
        return _mm512_cvtepi32_ps(_mm512_and_si512(nibbles(pairs), _mm512_set1_epi32(15)));
    }
    // To nearest even.
    static __m256i narrow(const Half*, Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
    static __m256i narrow(const BFloat*, Floats x) {
        const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
        const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, set1(1)));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
        const __m512i nan = _mm512_or_si512(high, set1(0x40)); // a NaN stays one
        return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, nan));
    }
};

} // namespace gr
