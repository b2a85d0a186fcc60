// The attention kernels of an instruction set, made from its vectors.
#pragma once

#include "few.h"
#include "many.h"

namespace gr::simd {

template <class V> static std::int64_t values_width(std::int64_t dim) {
    return round_up(dim, 2 * V::kWidth);
}

template <class V>
constexpr AttentionKernels kAttention{
    kFewRows, values_width<V>, FewRows<V>::scratch, ManyRows<V>::scratch, FewRows<V>::run, ManyRows<V>::run, finish<V>};

} // namespace gr::simd
