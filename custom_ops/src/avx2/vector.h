// Vectors of 8 floats, for the kernels in ../simd, which are written against this interface.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../attention.h"

namespace gr {

struct Avx2 {
    static constexpr std::int64_t kWidth = 8;
    static constexpr int kTileRows = 6;           // 6 x 2 accumulators, 2 columns and a broadcast fit in 16 registers
    static constexpr int kSums = 8;               // what `sums` takes at most
    static constexpr int kSlice[] = {8, 4, 4, 2}; // vectors of the head size that 1 to 4 rows are summed in at once

    using Floats = __m256;
    using Ints = __m256i;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats set1(float x) { return _mm256_set1_ps(x); }
    static Floats load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    // b where a is NaN.
    static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }

    static Ints set1(std::int32_t x) { return _mm256_set1_epi32(x); }

    // The first n lanes, 0 <= n < 8.
    static Ints first(std::int64_t n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    // Reads or writes n elements and nothing behind them; the other lanes are 0.
    static Floats load(const float* p, std::int64_t n) { return _mm256_maskload_ps(p, first(n)); }
    static void store(float* p, Floats x, std::int64_t n) { _mm256_maskstore_ps(p, first(n), x); }

    static void store(Half* p, Floats x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(p, x)); }
    static void store(BFloat* p, Floats x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(p, x)); }
    template <typename T> static void store(T* p, Floats x, std::int64_t n) {
        const __m128i elements = narrow(p, x);
        std::memcpy(p, &elements, static_cast<std::size_t>(n) * sizeof(T));
    }

    // Elements as floats: codes less the zero point, others as they are.
    static Floats values(const float* p, Ints) { return load(p); }
    static Floats values(const float* p, Ints, std::int64_t n) { return load(p, n); }
    static Floats values(const Half* p, Ints) { return _mm256_cvtph_ps(load16(p)); }
    static Floats values(const Half* p, Ints, std::int64_t n) { return _mm256_cvtph_ps(load_part(p, n)); }
    static Floats values(const BFloat* p, Ints) { return widen(load16(p)); }
    static Floats values(const BFloat* p, Ints, std::int64_t n) { return widen(load_part(p, n)); }
    static Floats values(const std::int8_t* p, Ints zero_point) {
        return difference(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), zero_point);
    }
    static Floats values(const std::int8_t* p, Ints zero_point, std::int64_t n) {
        return difference(load_part(p, n), zero_point);
    }

    // Int4 codes as floats, n of them.
    static Floats codes(const Int4Pair* p) {
        std::int32_t pairs;
        std::memcpy(&pairs, p, sizeof pairs);
        return codes(_mm_cvtsi32_si128(pairs));
    }
    static Floats codes(const Int4Pair* p, std::int64_t n) { return codes(load_part(p, divide_up(n, 2))); }

    // Int4 codes that share scale and zero point: their values.
    class PairGroup {
    public:
        PairGroup(std::int32_t zero_point, float scale)
            : zero_point_(set1(static_cast<float>(zero_point))), scale_(set1(scale)) {}
        Floats operator()(const Int4Pair* p) const { return mul(sub(codes(p), zero_point_), scale_); }
        Floats operator()(const Int4Pair* p, std::int64_t n) const {
            return mul(sub(codes(p, n), zero_point_), scale_);
        }

    private:
        Floats zero_point_, scale_;
    };

    static Floats abs(Floats x) { return _mm256_andnot_ps(set1(-0.0f), x); }
    // x >= 0 with the sign of y.
    static Floats with_sign(Floats x, Floats y) { return _mm256_or_ps(x, _mm256_and_ps(set1(-0.0f), y)); }
    // x where a < b, else y.
    static Floats where_less(Floats a, Floats b, Floats x, Floats y) {
        return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
    }
    // x where `condition` is not 0, else y.
    static Floats where_nonzero(Floats condition, Floats x, Floats y) {
        return _mm256_blendv_ps(y, x, _mm256_cmp_ps(condition, zero(), _CMP_NEQ_UQ));
    }
    // x, but y where the byte is 0.
    static Floats where_byte(const std::uint8_t* bytes, Floats x, Floats y) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
        return _mm256_blendv_ps(x, y, _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, _mm256_setzero_si256())));
    }
    // x + bias, but `hidden` where that is the bias.
    static Floats add_bias(Floats x, Floats bias, Floats hidden) {
        return _mm256_blendv_ps(_mm256_add_ps(x, bias), hidden, _mm256_cmp_ps(bias, hidden, _CMP_EQ_OQ));
    }
    static bool any_nan(Floats x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }

    static float sum(Floats x) {
        const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
    }
    static float max(Floats x) {
        const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
    }
    // The sums of Count <= 8 vectors, in order.
    template <int Count> static GR_ALWAYS_INLINE void sums(const Floats* x, float* out) {
        const auto pick = [&](int k) { return k < Count ? x[k] : zero(); };
        const Floats low = _mm256_hadd_ps(_mm256_hadd_ps(pick(0), pick(1)), _mm256_hadd_ps(pick(2), pick(3)));
        const Floats high = _mm256_hadd_ps(_mm256_hadd_ps(pick(4), pick(5)), _mm256_hadd_ps(pick(6), pick(7)));
        store(out, add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
    }

    // e^x for x <= 0; x may be minus infinity or NaN. With n = round(x / ln 2) and r = x - n ln 2, |r| <= ln 2 / 2:
    // e^x = 2^n e^r and e^r = 1 + r + r^2 q(r), where q of degree 4 is fitted for the least largest relative error of
    // e^r, 3.1e-9. With rounding the relative error is below 8.6e-8, 0.72 ulp (every float in range tried). Results
    // below the least normal float are 0.
    static Floats exp(Floats x) {
        const Floats n = _mm256_round_ps(mul(x, set1(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        // ln 2 in two parts: n times the first one is exact.
        const Floats r = _mm256_fnmadd_ps(n, set1(1.4286068e-06f), _mm256_fnmadd_ps(n, set1(0.69314575f), x));
        Floats q = set1(0.0013814599f);
        q = fma(q, r, set1(0.008368717f));
        q = fma(q, r, set1(0.04166839f));
        q = fma(q, r, set1(0.16666521f));
        q = fma(q, r, set1(0.49999994f));
        const Floats fraction = add(fma(mul(r, r), q, r), set1(1.0f));
        const Ints exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), set1(127)), 23);
        const Floats result = mul(fraction, _mm256_castsi256_ps(exponent));
        return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(-87.33654f), _CMP_LT_OQ), result);
    }
    static float exp(float x) { return _mm256_cvtss_f32(exp(set1(x))); }

    static void prefetch(const void* p) {
#if defined(__GNUC__)
        // gcc takes a function that does nothing but prefetch for one without effect, and drops its calls.
        __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
#else
        _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
#endif
    }

private:
    template <typename T> static __m128i load16(const T* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    // n elements in less than 16 bytes, and zeros.
    template <typename T> static __m128i load_part(const T* p, std::int64_t n) {
        __m128i elements = _mm_setzero_si128();
        std::memcpy(&elements, p, static_cast<std::size_t>(n) * sizeof(T));
        return elements;
    }
    static Floats widen(__m128i halves) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static Floats difference(__m128i codes, Ints zero_point) {
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepi8_epi32(codes), zero_point));
    }
    // Each byte in 64 bits: its low half is in the lower 32 of them, and shifted by 28 its high half in the upper ones.
    static Floats codes(__m128i pairs) {
        const __m256i wide = _mm256_cvtepu8_epi64(pairs);
        const __m256i halves = _mm256_or_si256(wide, _mm256_slli_epi64(wide, 28));
        return _mm256_cvtepi32_ps(_mm256_and_si256(halves, _mm256_set1_epi32(15)));
    }
    // To nearest even.
    static __m128i narrow(const Half*, Floats x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
    static __m128i narrow(const BFloat*, Floats x) {
        const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
        const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, set1(1)));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
        const __m256i nan = _mm256_or_si256(high, set1(0x40)); // a NaN stays one
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i result = _mm256_blendv_epi8(rounded, nan, is_nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
    }
};

} // namespace gr
