// Copies of tensors and parts of tensors, whatever their strides.
#pragma once

#include <cstdint>

#include "threads.h"

namespace gr {

// Dimensions of what is copied, in any order; strides in elements.
struct CopyShape {
    static constexpr int kMaxRank = 8;
    int rank = 0;
    std::int64_t size[kMaxRank], from[kMaxRank], to[kMaxRank];

    void add(std::int64_t size_, std::int64_t from_, std::int64_t to_) {
        size[rank] = size_;
        from[rank] = from_;
        to[rank++] = to_;
    }
};

// Source and target do not overlap. `item`: bytes of an element, 1, 2, 4 or 8.
void copy_elements(const void* from, void* to, std::int64_t item, const CopyShape& shape, const Threads& threads);

} // namespace gr
