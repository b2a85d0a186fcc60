// Attention for few rows a key/value head (decoding): the cache streams by once, and every row of keys or values is
// converted to floats in registers and used for all rows of the tile.
#pragma once

#include "softmax.h"

namespace gr::simd {

constexpr std::int64_t kFewRows = 8;
// Keys that are taken at once: their rows stay in the first-level cache while groups of query rows, or slices of the
// head size, pass over them.
constexpr std::int64_t kFewKeys = 16;
constexpr std::int64_t kAhead = 32; // rows from the one read to the one asked for
constexpr int kGroupRows = 4;       // rows that share a conversion

template <typename Element> static inline const Element* row_at(const Run& run, std::int64_t j) {
    return static_cast<const Element*>(run.rows) + j * run.stride;
}

// What to ask of memory while rows are read: a row's worth for each, `stride` bytes from one to the next. It may lie
// behind the end of the cache; asking is not an access.
struct Ahead {
    std::uintptr_t address;
    std::int64_t stride, bytes;

    template <class V> void ask(std::int64_t row) const {
        for (std::int64_t byte = row * stride; byte < row * stride + bytes; byte += 64)
            V::prefetch(reinterpret_cast<const void*>(address + static_cast<std::uintptr_t>(byte)));
    }
};

// Where the heads of a position lie side by side, the tiles of a block of positions come one head after the other.
// Memory is then asked for in its own order, head h asking for the h-th share of the block that follows, as that is
// what a processor recognises and runs ahead of: the rows of one head are too far apart for it.
template <typename Element>
static inline Ahead look_ahead(const Attention& a, const CachedRows& rows, const Run& run, std::int64_t head) {
    const std::int64_t item = sizeof(Element), count = run.end - run.begin;
    const bool together = heads_together(a, rows) && run.stride == rows.cache.stride[1];
    const std::int64_t distance = together ? count * run.stride + head * (count - 1) * a.dim : kAhead * run.stride;
    return {reinterpret_cast<std::uintptr_t>(run.rows) + static_cast<std::uintptr_t>(distance * item),
            (together ? a.dim : run.stride) * item, a.dim * item};
}

// Scores of Keys keys for Rows query rows: scores[r * pitch + k]. Tail: whether the last vector of a row is not full.
template <class V, int Rows, int Keys, bool Tail, typename Element>
static inline void dot(const float* query, std::int64_t query_pitch, const Element* row, std::int64_t stride,
                       const std::int32_t* zero_points, std::int64_t dim, float* scores, std::int64_t pitch) {
    typename V::Floats sums[Keys * Rows];
    for (int n = 0; n < Keys * Rows; ++n)
        sums[n] = V::zero();
    const std::int64_t full = Tail ? dim / V::kWidth * V::kWidth : dim;
    for (std::int64_t d = 0; d < full; d += V::kWidth)
        for (int k = 0; k < Keys; ++k) {
            const auto key = V::values(row + k * stride + d, V::set1(zero_points[k]));
            for (int r = 0; r < Rows; ++r)
                sums[k * Rows + r] = V::fma(key, V::load(query + r * query_pitch + d), sums[k * Rows + r]);
        }
    if constexpr (Tail)
        for (int k = 0; k < Keys; ++k) {
            const auto key = V::values(row + k * stride + full, V::set1(zero_points[k]), dim - full);
            for (int r = 0; r < Rows; ++r)
                sums[k * Rows + r] = V::fma(key, V::load(query + r * query_pitch + full), sums[k * Rows + r]);
        }
    float results[8];
    V::template sums<Keys * Rows>(sums, results);
    for (int k = 0; k < Keys; ++k)
        for (int r = 0; r < Rows; ++r)
            scores[r * pitch + k] = results[k * Rows + r];
}

// Enough keys at once for eight sums: fewer would wait for each other.
template <class V, int Rows, bool Tail, typename Element>
static void dot_keys(const float* query, std::int64_t query_pitch, const Element* row, std::int64_t stride,
                     const std::int32_t* zero_points, std::int64_t keys, std::int64_t dim, float* scores,
                     std::int64_t pitch, const Ahead& ahead, std::int64_t position) {
    constexpr int kKeys = Rows == 1 ? 8 : Rows == 2 ? 4 : 2;
    std::int64_t j = 0;
    for (; j + kKeys <= keys; j += kKeys) {
        for (int k = 0; k < kKeys; ++k)
            ahead.template ask<V>(position + j + k);
        dot<V, Rows, kKeys, Tail>(query, query_pitch, row + j * stride, stride, zero_points + j, dim, scores + j,
                                  pitch);
    }
    for (; j < keys; ++j)
        dot<V, Rows, 1, Tail>(query, query_pitch, row + j * stride, stride, zero_points + j, dim, scores + j, pitch);
}

// Adds weight times value rows for Count vectors of the head size to the values of Rows query rows. `last`: elements of
// the last vector, when it is not full.
template <class V, int Rows, int Count, bool Tail, typename Element>
static inline void add_slice(const float* weights, std::int64_t pitch, const Element* row, std::int64_t stride,
                             const std::int32_t* zero_points, std::int64_t keys, float* values, std::int64_t width,
                             std::int64_t last) {
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

template <class V, int Rows, typename Element>
static void add_keys(const float* weights, std::int64_t pitch, const Element* row, std::int64_t stride,
                     const std::int32_t* zero_points, std::int64_t keys, std::int64_t dim, float* values,
                     std::int64_t width, const Ahead& ahead, std::int64_t position) {
    constexpr int kCount = Rows == 1 ? 8 : Rows == 4 ? 2 : 4;
    constexpr std::int64_t kSlice = kCount * V::kWidth;
    std::int64_t d = 0, asked = 0;
    for (; d + kSlice <= dim; d += kSlice) {
        // Spread over the slices: memory takes few requests at a time.
        for (const std::int64_t until = (d + kSlice) * keys / dim; asked < until; ++asked)
            ahead.template ask<V>(position + asked);
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

// Whether a float of the rows is infinite or NaN: those times 0 give NaN.
template <class V>
static bool has_nonfinite(const float* row, std::int64_t stride, std::int64_t rows, std::int64_t dim) {
    auto check = V::zero();
    for (std::int64_t j = 0; j < rows; ++j) {
        std::int64_t d = 0;
        for (; d + V::kWidth <= dim; d += V::kWidth)
            check = V::fma(V::load(row + j * stride + d), V::zero(), check);
        if (d < dim)
            check = V::fma(V::load(row + j * stride + d, dim - d), V::zero(), check);
    }
    return V::any_nan(check);
}

template <class V> class FewRows {
public:
    static std::int64_t scratch(const Attention& a, std::int64_t rows, std::int64_t keys) {
        const std::int64_t pitch = round_up(keys, V::kWidth);
        return rows * round_up(a.dim, V::kWidth) + (rows + 2) * pitch;
    }

    static void run(const Attention& a, const Tile& tile, const Partial& out, float* scratch) {
        FewRows(a, tile, out, scratch).run();
    }

private:
    FewRows(const Attention& a, const Tile& tile, const Partial& out, float* scratch)
        : a_(a), tile_(tile), out_(out), rows_(tile_rows(a, tile)), keys_(tile.key_end - tile.key_begin),
          pitch_(round_up(keys_, V::kWidth)), query_pitch_(round_up(a.dim, V::kWidth)),
          width_(round_up(a.dim, 2 * V::kWidth)), query_(scratch), scores_(query_ + rows_ * query_pitch_),
          scales_(scores_ + rows_ * pitch_), zero_points_(reinterpret_cast<std::int32_t*>(scales_ + pitch_)) {}

    void run() {
        if (keys_ <= 0)
            return;
        load_query();
        for (std::int64_t j = keys_; j < pitch_; ++j) {
            scales_[j] = 0;
            zero_points_[j] = 0;
            for (std::int64_t r = 0; r < rows_; ++r)
                scores_[r * pitch_ + j] = 0;
        }
        Run runs[3];
        const int key_runs = split(a_, a_.key, tile_.batch, tile_.kv_head, tile_.key_begin, tile_.key_end, runs);
        for (int n = 0; n < key_runs; ++n)
            load_parameters(runs[n]);
        for (int n = 0; n < key_runs; ++n)
            runs[n].quantized ? score_run<std::int8_t>(runs[n]) : score_run<float>(runs[n]);
        for (std::int64_t r = 0; r < rows_; ++r)
            weigh(r);
        const int value_runs = split(a_, a_.value, tile_.batch, tile_.kv_head, tile_.key_begin, tile_.key_end, runs);
        for (int n = 0; n < value_runs; ++n)
            load_parameters(runs[n]);
        for (std::int64_t r = 0; r < rows_; ++r)
            scale_weights(scores_ + r * pitch_);
        for (int n = 0; n < value_runs; ++n)
            runs[n].quantized ? add<std::int8_t>(runs[n]) : add<float>(runs[n]);
    }

    void load_query() {
        const auto scale = V::set1(a_.scale);
        for (std::int64_t r = 0; r < rows_; ++r) {
            const float* source = query_row(a_, tile_, r);
            float* target = query_ + r * query_pitch_;
            std::int64_t d = 0;
            for (; d + V::kWidth <= a_.dim; d += V::kWidth)
                V::store(target + d, V::mul(V::load(source + d), scale));
            if (d < a_.dim)
                V::store(target + d, V::mul(V::load(source + d, a_.dim - d), scale));
        }
    }

    // Brings scales and zero points side by side.
    void load_parameters(const Run& run) {
        float* scales = scales_ + (run.begin - tile_.key_begin);
        std::int32_t* zero_points = zero_points_ + (run.begin - tile_.key_begin);
        const std::int64_t count = run.end - run.begin;
        for (std::int64_t j = 0; j < count; ++j)
            scales[j] = run.quantized ? run.scales[j * run.scale_stride] : 1.0f;
        for (std::int64_t j = 0; j < count; ++j)
            zero_points[j] = run.zero_points != nullptr ? run.zero_points[j * run.zero_point_stride] : 0;
    }

    template <typename Element> void score_run(const Run& run) {
        a_.dim % V::kWidth == 0 ? score<Element, false>(run) : score<Element, true>(run);
    }

    // query . (code - zero_point) of a run; the scale comes later.
    template <typename Element, bool Tail> void score(const Run& run) {
        const std::int64_t count = run.end - run.begin, offset = run.begin - tile_.key_begin;
        const Ahead ahead = look_ahead<Element>(a_, a_.key, run, tile_.kv_head);
        for (std::int64_t j = 0; j < count; j += kFewKeys) {
            const std::int64_t keys = smaller(kFewKeys, count - j);
            const Element* row = row_at<Element>(run, j);
            for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                dot_keys<V, decltype(rows)::value, Tail>(query_ + r * query_pitch_, query_pitch_, row, run.stride,
                                                         zero_points_ + offset + j, keys, a_.dim,
                                                         scores_ + r * pitch_ + offset + j, pitch_, ahead, j);
            });
        }
    }

    // Scores to weights, for one row.
    void weigh(std::int64_t r) {
        float* scores = scores_ + r * pitch_;
        for (std::int64_t j = 0; j < pitch_; j += V::kWidth)
            V::store(scores + j, V::mul(V::load(scores + j), V::load(scales_ + j)));
        const std::int64_t visible = visible_keys(a_, tile_, r, tile_.key_begin, keys_);
        for (std::int64_t j = visible; j < keys_; ++j)
            scores[j] = kHidden;
        if (a_.mask.data != nullptr)
            apply_mask<V>(a_, tile_.batch, tile_.row_begin + r / a_.group, tile_.kv_head * a_.group + r % a_.group,
                          tile_.key_begin, visible, scores);
        rescale<V>(out_.values + r * width_, width_, softmax<V>(scores, keys_, out_.maximum[r], out_.sum[r]));
    }

    // Times the scales of the values, which may be NaN for a key the row does not see.
    void scale_weights(float* weights) {
        for (std::int64_t j = 0; j < pitch_; j += V::kWidth) {
            const auto weight = V::load(weights + j);
            V::store(weights + j, V::where_nonzero(weight, V::mul(weight, V::load(scales_ + j)), V::zero()));
        }
    }

    template <typename Element> void add(const Run& run) {
        const std::int64_t count = run.end - run.begin, offset = run.begin - tile_.key_begin;
        const Ahead ahead = look_ahead<Element>(a_, a_.value, run, tile_.kv_head);
        for (std::int64_t j = 0; j < count; j += kFewKeys) {
            const std::int64_t keys = smaller(kFewKeys, count - j);
            const Element* row = row_at<Element>(run, j);
            const float* weights = scores_ + offset + j;
            if (sizeof(Element) == sizeof(float) && hides(a_, tile_) &&
                has_nonfinite<V>(reinterpret_cast<const float*>(row), run.stride, keys, a_.dim)) {
                add_visible(row, run.stride, weights, keys);
                continue;
            }
            for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                add_keys<V, decltype(rows)::value>(weights + r * pitch_, pitch_, row, run.stride,
                                                   zero_points_ + offset + j, keys, a_.dim, out_.values + r * width_,
                                                   width_, ahead, j);
            });
        }
    }

    // Leaves out keys of weight 0, which may hold what no factor makes vanish.
    template <typename Element>
    void add_visible(const Element* row, std::int64_t stride, const float* weights, std::int64_t keys) {
        for (std::int64_t r = 0; r < rows_; ++r)
            for (std::int64_t j = 0; j < keys; ++j)
                for (std::int64_t d = 0; weights[r * pitch_ + j] != 0 && d < a_.dim; ++d)
                    out_.values[r * width_ + d] += weights[r * pitch_ + j] * static_cast<float>(row[j * stride + d]);
    }

    const Attention& a_;
    const Tile& tile_;
    const Partial& out_;
    const std::int64_t rows_, keys_, pitch_, query_pitch_, width_;
    float* query_;              // [rows, query_pitch], scaled, padded with 0
    float* scores_;             // [rows, pitch], then weights
    float* scales_;             // [pitch]
    std::int32_t* zero_points_; // [pitch]
};

} // namespace gr::simd
