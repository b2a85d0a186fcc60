// Vectors of 8 floats, for the kernels in ../simd, which are written against this interface.
#pragma once

#include <immintrin.h>

#include <cstdint>

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

    // Elements of a cache as floats: floats as they are, codes less their zero point.
    static Floats values(const float* p, Ints) { return load(p); }
    static Floats values(const float* p, Ints, std::int64_t n) { return load(p, n); }
    static Floats values(const std::int8_t* p, Ints zero_point) {
        const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepi8_epi32(codes), zero_point));
    }
    static Floats values(const std::int8_t* p, Ints zero_point, std::int64_t n) {
        std::uint64_t codes = 0;
        for (std::int64_t k = 0; k < n; ++k)
            codes |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(p[k])) << (8 * k);
        const __m128i packed = _mm_set_epi64x(0, static_cast<long long>(codes));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepi8_epi32(packed), zero_point));
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
    template <int Count> static void sums(const Floats* x, float* out) {
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
};

} // namespace gr
