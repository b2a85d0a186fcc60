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

template <class V, typename Element> static inline void prefetch_rows(const Element* row, std::int64_t stride,
                                                                      std::int64_t rows, std::int64_t dim) {
    for (std::int64_t j = 0; j < rows; ++j) {
        const auto address = reinterpret_cast<std::uintptr_t>(row + j * stride);
        for (std::int64_t byte = 0; byte < dim * static_cast<std::int64_t>(sizeof(Element)); byte += 64)
            V::prefetch(reinterpret_cast<const void*>(address + static_cast<std::uintptr_t>(byte)));
    }
}

// Scores of Keys keys for Rows query rows: scores[r * pitch + k].
template <class V, int Rows, int Keys, typename Element>
static inline void dot(const float* query, std::int64_t query_pitch, const Element* row, std::int64_t stride,
                       const std::int32_t* zero_points, std::int64_t dim, float* scores, std::int64_t pitch) {
    typename V::Floats sums[Keys * Rows];
    for (int n = 0; n < Keys * Rows; ++n)
        sums[n] = V::zero();
    std::int64_t d = 0;
    for (; d + V::kWidth <= dim; d += V::kWidth)
        for (int k = 0; k < Keys; ++k) {
            const auto key = V::values(row + k * stride + d, V::set1(zero_points[k]));
            for (int r = 0; r < Rows; ++r)
                sums[k * Rows + r] = V::fma(key, V::load(query + r * query_pitch + d), sums[k * Rows + r]);
        }
    if (d < dim)
        for (int k = 0; k < Keys; ++k) {
            const auto key = V::values(row + k * stride + d, V::set1(zero_points[k]), dim - d);
            for (int r = 0; r < Rows; ++r)
                sums[k * Rows + r] = V::fma(key, V::load(query + r * query_pitch + d), sums[k * Rows + r]);
        }
    float results[8];
    V::template sums<Keys * Rows>(sums, results);
    for (int k = 0; k < Keys; ++k)
        for (int r = 0; r < Rows; ++r)
            scores[r * pitch + k] = results[k * Rows + r];
}

// Enough keys at once for eight sums: fewer would wait for each other.
template <class V, int Rows, typename Element>
static void dot_keys(const float* query, std::int64_t query_pitch, const Element* row, std::int64_t stride,
                     const std::int32_t* zero_points, std::int64_t keys, std::int64_t dim, float* scores,
                     std::int64_t pitch) {
    constexpr int kKeys = Rows == 1 ? 8 : Rows == 2 ? 4 : 2;
    std::int64_t j = 0;
    for (; j + kKeys <= keys; j += kKeys)
        dot<V, Rows, kKeys>(query, query_pitch, row + j * stride, stride, zero_points + j, dim, scores + j, pitch);
    for (; j < keys; ++j)
        dot<V, Rows, 1>(query, query_pitch, row + j * stride, stride, zero_points + j, dim, scores + j, pitch);
}

// Adds weight times value rows for Count vectors of the head size to the values of Rows query rows.
template <class V, int Rows, int Count, typename Element>
static inline void add_slice(const float* weights, std::int64_t pitch, const Element* row, std::int64_t stride,
                             const std::int32_t* zero_points, std::int64_t keys, float* values, std::int64_t width) {
    typename V::Floats sums[Rows][Count];
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Count; ++c)
            sums[r][c] = V::load(values + r * width + c * V::kWidth);
    for (std::int64_t j = 0; j < keys; ++j) {
        typename V::Floats weight[Rows];
        for (int r = 0; r < Rows; ++r)
            weight[r] = V::set1(weights[r * pitch + j]);
        const auto zero_point = V::set1(zero_points[j]);
        for (int c = 0; c < Count; ++c) {
            const auto value = V::values(row + j * stride + c * V::kWidth, zero_point);
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
                     std::int64_t width) {
    constexpr int kCount = Rows == 1 ? 8 : Rows == 4 ? 2 : 4;
    std::int64_t d = 0;
    for (; d + kCount * V::kWidth <= dim; d += kCount * V::kWidth)
        add_slice<V, Rows, kCount>(weights, pitch, row + d, stride, zero_points, keys, values + d, width);
    for (; d + V::kWidth <= dim; d += V::kWidth)
        add_slice<V, Rows, 1>(weights, pitch, row + d, stride, zero_points, keys, values + d, width);
    if (d == dim)
        return;
    for (int r = 0; r < Rows; ++r) {
        auto sum = V::load(values + r * width + d);
        for (std::int64_t j = 0; j < keys; ++j)
            sum = V::fma(V::set1(weights[r * pitch + j]),
                         V::values(row + j * stride + d, V::set1(zero_points[j]), dim - d), sum);
        V::store(values + r * width + d, sum);
    }
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
template <class V> static bool has_nonfinite(const float* row, std::int64_t stride, std::int64_t rows, std::int64_t dim) {
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
        for (std::int64_t r = 0; r < rows_; ++r) {
            out_.maximum[r] = kHidden;
            out_.sum[r] = 0;
        }
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
            runs[n].quantized ? score<std::int8_t>(runs[n]) : score<float>(runs[n]);
        for (std::int64_t r = 0; r < rows_; ++r)
            weigh(r);
        const int value_runs = split(a_, a_.value, tile_.batch, tile_.kv_head, tile_.key_begin, tile_.key_end, runs);
        for (int n = 0; n < value_runs; ++n)
            load_parameters(runs[n]);
        for (std::int64_t d = 0; d < rows_ * width_; ++d)
            out_.values[d] = 0;
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

    // query . (code - zero_point) of a run; the scale comes later.
    template <typename Element> void score(const Run& run) {
        const std::int64_t count = run.end - run.begin, offset = run.begin - tile_.key_begin;
        for (std::int64_t j = 0; j < count; j += kFewKeys) {
            const std::int64_t keys = smaller(kFewKeys, count - j);
            const Element* row = row_at<Element>(run, j);
            if (j + kAhead < count)
                prefetch_rows<V>(row + kAhead * run.stride, run.stride, smaller(kFewKeys, count - j - kAhead), a_.dim);
            for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                dot_keys<V, decltype(rows)::value>(query_ + r * query_pitch_, query_pitch_, row, run.stride,
                                                   zero_points_ + offset + j, keys, a_.dim,
                                                   scores_ + r * pitch_ + offset + j, pitch_);
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
        softmax<V>(scores, keys_, out_.maximum[r], out_.sum[r]);
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
        for (std::int64_t j = 0; j < count; j += kFewKeys) {
            const std::int64_t keys = smaller(kFewKeys, count - j);
            const Element* row = row_at<Element>(run, j);
            const float* weights = scores_ + offset + j;
            if (j + kAhead < count)
                prefetch_rows<V>(row + kAhead * run.stride, run.stride, smaller(kFewKeys, count - j - kAhead), a_.dim);
            if (sizeof(Element) == sizeof(float) && hides(a_, tile_) &&
                has_nonfinite<V>(reinterpret_cast<const float*>(row), run.stride, keys, a_.dim)) {
                add_visible(row, run.stride, weights, keys);
                continue;
            }
            for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                add_keys<V, decltype(rows)::value>(weights + r * pitch_, pitch_, row, run.stride,
                                                   zero_points_ + offset + j, keys, a_.dim, out_.values + r * width_,
                                                   width_);
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
