// Dequantization, for the vectors of an instruction set. It is bound by memory: a code is one byte and its value four,
// so large results are written past the caches, which saves reading what is overwritten.
//
// Sixteen<F> holds 16 elements in float or double; their float values are a whole cache line. It has set1,
// load(elements, n), of(floats), operator * and, of the float values, store(to, n) and stream(to); Sixteen<float> has
// load_codes(codes, n) and operator - besides. n <= 16, and what is loaded beyond n is 0.
#pragma once

#include <immintrin.h>

#include "../operands.h"
#include "../quantize.h"

namespace gr::simd {
namespace {

constexpr std::int64_t kLine = 16;    // floats
constexpr std::int64_t kAhead = 2048; // how many codes ahead of a stream are fetched

// Stores what convert(k, n) gives for n elements from k on. `codes`: what the first ones come from.
template <typename Convert>
void store_values(const void* codes, std::int64_t count, bool stream, float* values, const Convert& convert) {
    std::int64_t k = 0;
    if (stream) {
        const auto within = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(values) / sizeof(float)) % kLine;
        k = within == 0 ? 0 : smaller(kLine - within, count);
        if (k > 0)
            convert(0, k).store(values, k);
        for (; k + 4 * kLine <= count; k += 4 * kLine) {
            _mm_prefetch(static_cast<const char*>(codes) + k + kAhead, _MM_HINT_T0); // harmless where nothing is
            for (std::int64_t j = 0; j < 4 * kLine; j += kLine)
                convert(k + j, kLine).stream(values + k + j);
        }
    }
    for (; k + kLine <= count; k += kLine)
        convert(k, kLine).store(values + k, kLine);
    if (k < count)
        convert(k, count - k).store(values + k, count - k);
}

template <template <typename> class Sixteen> struct Dequantize {
    template <typename Q, typename F>
    static void run(const Q* codes, std::int64_t count, F scale, float zero_point, bool stream, float* values) {
        const auto factor = Sixteen<F>::set1(scale);
        const auto zero = Sixteen<float>::set1(zero_point);
        store_values(codes, count, stream, values, [&](std::int64_t k, std::int64_t n) {
            return Sixteen<F>::of(Sixteen<float>::load_codes(codes + k, n) - zero) * factor;
        });
    }

    template <typename Q, typename F>
    static void each(const Q* codes, std::int64_t count, const F* scales, const float* zero_points, bool stream,
                     float* values) {
        if (zero_points == nullptr)
            store_values(codes, count, stream, values, [&](std::int64_t k, std::int64_t n) {
                return Sixteen<F>::of(Sixteen<float>::load_codes(codes + k, n)) * Sixteen<F>::load(scales + k, n);
            });
        else
            store_values(codes, count, stream, values, [&](std::int64_t k, std::int64_t n) {
                const auto code = Sixteen<float>::load_codes(codes + k, n);
                const auto zero = Sixteen<float>::load(zero_points + k, n);
                return Sixteen<F>::of(code - zero) * Sixteen<F>::load(scales + k, n);
            });
    }

    static void stream(const float* from, std::int64_t count, const void* codes, float* to) {
        store_values(codes, count, true, to,
                     [&](std::int64_t k, std::int64_t n) { return Sixteen<float>::load(from + k, n); });
    }

    template <typename Q, typename F> static constexpr DequantizeKernels<Q, F, float> kernels() {
        return {run<Q, F>, each<Q, F>};
    }
    static constexpr DequantizationKernels all() {
        return {{kernels<std::int8_t, float>(), kernels<std::int8_t, double>(), kernels<std::uint8_t, float>(),
                 kernels<std::uint8_t, double>()},
                stream,
                [] { _mm_sfence(); }};
    }
};

} // namespace
} // namespace gr::simd
