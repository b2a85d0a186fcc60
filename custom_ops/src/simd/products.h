// The two products of decoding: query rows times keys, and weights times values, for rows that are converted to floats
// in registers.
#pragma once

#include "runs.h"

namespace gr::simd {

// Keys that are taken at once: their rows stay in the first-level cache while heads, groups of query rows, or slices of
// the head size, pass over them.
constexpr std::int64_t kFewKeys = 16;
constexpr std::int64_t kAhead = 4096; // bytes, at least, from what is read to what is asked for
constexpr int kGroupRows = 4;         // rows that share a conversion

// What to ask of memory while kFewKeys rows of one head are read: as much as those, farther on, and in the order of
// addresses. That is what a processor recognises and runs ahead of, and where the heads of a position lie side by side,
// the rows of one head are too far apart for it. So head h of `heads` asks for the h-th share of all of theirs. It may
// lie behind the end of the cache; asking is not an access.
class Ahead {
public:
    // `row`: the first one read, of head number `head`; elements of `item` bytes, `stride` from one row to the next.
    Ahead(const void* row, std::int64_t stride, std::int64_t item, std::int64_t dim, std::int64_t head,
          std::int64_t heads)
        : stride_((heads > 1 ? dim : stride) * item), bytes_(dim * item) {
        const std::int64_t share = heads > 1 ? head * (kFewKeys - 1) * dim * item : 0;
        // The stride of a single row, or of one row that stands for all, may be anything.
        const std::int64_t step = smaller(larger(stride, 1), kLargestStep) * item;
        const std::int64_t distance = round_up(kAhead, kFewKeys * step) + share;
        address_ = reinterpret_cast<std::uintptr_t>(row) + static_cast<std::uintptr_t>(distance);
    }

    // For rows [begin, end).
    template <class V> void ask(std::int64_t begin, std::int64_t end) const {
        if (stride_ == bytes_)
            return lines<V>(begin * stride_, end * stride_);
        for (std::int64_t k = begin; k < end; ++k)
            lines<V>(k * stride_, k * stride_ + bytes_);
    }

private:
    template <class V> void lines(std::int64_t begin, std::int64_t end) const {
        for (std::uintptr_t at = address_ + static_cast<std::uintptr_t>(begin),
                            to = address_ + static_cast<std::uintptr_t>(end);
             at < to; at += 64)
            V::prefetch(reinterpret_cast<const void*>(at));
    }

    static constexpr std::int64_t kLargestStep = std::int64_t{1} << 40;

    std::uintptr_t address_;
    std::int64_t stride_, bytes_;
};

// Scores of Keys keys for Rows query rows: scores[r * pitch + k]. Tail: whether the last vector of a row is not full.
template <class V, int Rows, int Keys, bool Tail, typename T>
static GR_ALWAYS_INLINE void dot(const float* query, std::int64_t query_pitch, const T* row, std::int64_t stride,
                                 const std::int32_t* zero_points, std::int64_t dim, float* scores, std::int64_t pitch) {
    typename V::Floats sums[Keys * Rows];
    for (int n = 0; n < Keys * Rows; ++n)
        sums[n] = V::zero();
    const std::int64_t full = Tail ? dim / V::kWidth * V::kWidth : dim;
    for (std::int64_t d = 0; d < full; d += V::kWidth)
        for (int k = 0; k < Keys; ++k) {
            const auto key = V::values(row + k * stride + d, V::set1(zero_points[k]));
            for (int r = 0; r < Rows; ++r)
                sums[r * Keys + k] = V::fma(key, V::load(query + r * query_pitch + d), sums[r * Keys + k]);
        }
    if constexpr (Tail)
        for (int k = 0; k < Keys; ++k) {
            const auto key = V::values(row + k * stride + full, V::set1(zero_points[k]), dim - full);
            for (int r = 0; r < Rows; ++r)
                sums[r * Keys + k] = V::fma(key, V::load(query + r * query_pitch + full), sums[r * Keys + k]);
        }
    float results[V::kSums];
    V::template sums<Keys * Rows>(sums, results);
    for (int r = 0; r < Rows; ++r)
        for (int k = 0; k < Keys; ++k)
            scores[r * pitch + k] = results[r * Keys + k];
}

// As many keys at once as there may be sums: fewer would wait for each other.
template <class V, int Rows, bool Tail, typename T>
static GR_ALWAYS_INLINE void dot_keys(const float* query, std::int64_t query_pitch, const T* row, std::int64_t stride,
                                      const std::int32_t* zero_points, std::int64_t keys, std::int64_t dim,
                                      float* scores, std::int64_t pitch, const Ahead& ahead) {
    constexpr int kKeys = V::kSums / (Rows == 3 ? 4 : Rows);
    std::int64_t j = 0;
    for (; j + kKeys <= keys; j += kKeys) {
        ahead.template ask<V>(j, j + kKeys);
        dot<V, Rows, kKeys, Tail>(query, query_pitch, row + j * stride, stride, zero_points + j, dim, scores + j,
                                  pitch);
    }
    for (; j < keys; ++j)
        dot<V, Rows, 1, Tail>(query, query_pitch, row + j * stride, stride, zero_points + j, dim, scores + j, pitch);
}

// Adds weight times value rows for Count vectors of the head size to the values of Rows query rows. `last`: elements of
// the last vector, when it is not full.
template <class V, int Rows, int Count, bool Tail, typename T>
static GR_ALWAYS_INLINE void add_slice(const float* weights, std::int64_t pitch, const T* row, std::int64_t stride,
                                       const std::int32_t* zero_points, std::int64_t keys, float* values,
                                       std::int64_t width, std::int64_t last) {
    typename V::Floats sums[Rows][Count];
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Count; ++c)
            sums[r][c] = V::load(values + r * width + c * V::kWidth);
    for (std::int64_t j = 0; j < keys; ++j, row += stride) {
        typename V::Floats weight[Rows];
        for (int r = 0; r < Rows; ++r)
            weight[r] = V::set1(weights[r * pitch + j]);
        const auto zero_point = V::set1(zero_points[j]);
        for (int c = 0; c < Count; ++c) {
            typename V::Floats value;
            if constexpr (Tail)
                value = V::values(row + c * V::kWidth, zero_point, last);
            else
                value = V::values(row + c * V::kWidth, zero_point);
            for (int r = 0; r < Rows; ++r)
                sums[r][c] = V::fma(weight[r], value, sums[r][c]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Count; ++c)
            V::store(values + r * width + c * V::kWidth, sums[r][c]);
}

template <class V, int Rows, typename T>
static GR_ALWAYS_INLINE void add_keys(const float* weights, std::int64_t pitch, const T* row, std::int64_t stride,
                                      const std::int32_t* zero_points, std::int64_t keys, std::int64_t dim,
                                      float* values, std::int64_t width, const Ahead& ahead) {
    constexpr int kCount = V::kSlice[Rows - 1];
    constexpr std::int64_t kSlice = kCount * V::kWidth;
    std::int64_t d = 0, asked = 0;
    for (; d + kSlice <= dim; d += kSlice) {
        // Spread over the slices: memory takes few requests at a time.
        const std::int64_t until = (d + kSlice) * keys / dim;
        ahead.template ask<V>(asked, until);
        asked = until;
        add_slice<V, Rows, kCount, false>(weights, pitch, row + d, stride, zero_points, keys, values + d, width, 0);
    }
    for (; d + V::kWidth <= dim; d += V::kWidth)
        add_slice<V, Rows, 1, false>(weights, pitch, row + d, stride, zero_points, keys, values + d, width, 0);
    if (d < dim)
        add_slice<V, Rows, 1, true>(weights, pitch, row + d, stride, zero_points, keys, values + d, width, dim - d);
}

// Calls body(integral constant of 1 to 4, first row) for groups of nearly equal size.
template <int Rows> struct RowCount {
    static constexpr int value = Rows;
};
template <typename Body> static inline void for_row_groups(std::int64_t rows, const Body& body) {
    const std::int64_t groups = divide_up(rows, kGroupRows);
    for (std::int64_t g = 0, first = 0; g < groups; ++g) {
        const std::int64_t count = divide_up(rows - first, groups - g);
        switch (count) {
        case 1:
            body(RowCount<1>(), first);
            break;
        case 2:
            body(RowCount<2>(), first);
            break;
        case 3:
            body(RowCount<3>(), first);
            break;
        default:
            body(RowCount<4>(), first);
        }
        first += count;
    }
}

// Whether an element of the rows is infinite or NaN: those times 0 give NaN.
template <class V, typename T>
static bool has_nonfinite(const T* row, std::int64_t stride, std::int64_t rows, std::int64_t dim) {
    const auto none = V::set1(std::int32_t{0});
    auto check = V::zero();
    for (std::int64_t j = 0; j < rows; ++j, row += stride)
        for (std::int64_t d = 0; d < dim; d += V::kWidth) {
            const auto value = d + V::kWidth <= dim ? V::values(row + d, none) : V::values(row + d, none, dim - d);
            check = V::fma(value, V::zero(), check);
        }
    return V::any_nan(check);
}

} // namespace gr::simd
