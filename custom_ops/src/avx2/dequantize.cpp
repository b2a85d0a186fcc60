// Dequantization for AVX2. It is bound by memory: a code is one byte and its value four, so large results are written
// past the caches, which saves reading what is overwritten.
#include <cstring>
#include <type_traits>

#include "../operands.h"
#include "eight.h"
#include "quantize.h"

namespace gr::avx2 {
namespace {

constexpr std::int64_t kWidth = 8;

// The first n <= 8 codes.
template <typename Q> __m128i load_bytes(const Q* codes, std::int64_t n) {
    std::int64_t bytes = 0;
    std::memcpy(&bytes, codes, n == kWidth ? sizeof bytes : static_cast<std::size_t>(n));
    return _mm_cvtsi64_si128(bytes);
}

template <typename F, typename Q> Eight<F> load_codes(const Q* codes, std::int64_t n) {
    const __m128i bytes = load_bytes(codes, n);
    const __m256i wide = std::is_signed_v<Q> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    return Eight<F>::of(wide);
}

// `convert(k, n)`: the values of n elements from k on.
template <typename Convert> void store_values(std::int64_t count, float* values, Convert convert) {
    std::int64_t k = 0;
    for (; k + kWidth <= count; k += kWidth)
        Avx2::store(values + k, convert(k, kWidth));
    if (k < count)
        Avx2::store(values + k, convert(k, count - k), count - k);
}

} // namespace

template <typename Q, typename F>
void Dequantize<Q, F>::run(const Q* codes, std::int64_t count, F scale, F zero_point, float* values) {
    const Eight<F> factor = Eight<F>::set1(scale), zero = Eight<F>::set1(zero_point);
    store_values(count, values, [&](std::int64_t k, std::int64_t n) {
        return ((load_codes<F>(codes + k, n) - zero) * factor).floats();
    });
}

template <typename Q, typename F>
void Dequantize<Q, F>::each(const Q* codes, std::int64_t count, const F* scales, const F* zero_points, float* values) {
    if (zero_points == nullptr)
        store_values(count, values, [&](std::int64_t k, std::int64_t n) {
            return (load_codes<F>(codes + k, n) * Eight<F>::load(scales + k, n)).floats();
        });
    else
        store_values(count, values, [&](std::int64_t k, std::int64_t n) {
            const Eight<F> difference = load_codes<F>(codes + k, n) - Eight<F>::load(zero_points + k, n);
            return (difference * Eight<F>::load(scales + k, n)).floats();
        });
}

template struct Dequantize<std::int8_t, float>;
template struct Dequantize<std::int8_t, double>;
template struct Dequantize<std::uint8_t, float>;
template struct Dequantize<std::uint8_t, double>;

void stream(const float* from, std::int64_t count, float* to, const void* next) {
    // Streaming stores are aligned.
    const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) / sizeof(float) % kWidth);
    std::int64_t k = misaligned == 0 ? 0 : smaller(kWidth - misaligned, count);
    if (k > 0)
        Avx2::store(to, Avx2::load(from, k), k);
    const auto eight = [&](std::int64_t at) { _mm256_stream_ps(to + at, Avx2::load(from + at)); };
    for (constexpr std::int64_t kLine = 64; k + kLine <= count; k += kLine) {
        Avx2::prefetch(static_cast<const char*>(next) + k);
        for (std::int64_t j = 0; j < kLine; j += kWidth)
            eight(k + j);
    }
    for (; k + kWidth <= count; k += kWidth)
        eight(k);
    if (k < count)
        Avx2::store(to + k, Avx2::load(from + k, count - k), count - k);
}

void finish_streams() {
    _mm_sfence();
}

} // namespace gr::avx2
