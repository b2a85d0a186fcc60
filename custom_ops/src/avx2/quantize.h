#pragma once

#include "../quantize.h"

namespace gr::avx2 {

extern const QuantizationKernels kQuantization;

// Parts of it: see QuantizationKernels.
template <typename Q, typename F> struct Dequantize {
    static void run(const Q* codes, std::int64_t count, F scale, F zero_point, float* values);
    static void each(const Q* codes, std::int64_t count, const F* scales, const F* zero_points, float* values);
};
void stream(const float* from, std::int64_t count, float* to, const void* next);
void finish_streams();

} // namespace gr::avx2
