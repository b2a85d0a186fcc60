// Attention for few rows a key/value head (decoding): the cache streams by once, and every row of keys or values is
// converted to floats in registers and used for all rows of the tile.
#pragma once

#include "softmax.h"

namespace gr::simd {

constexpr std::int64_t kFewRows = 8;
// Keys that are taken at once: their rows stay in the first-level cache while heads, groups of query rows, or slices of
// the head size, pass over them.
constexpr std::int64_t kFewKeys = 16;
constexpr std::int64_t kBlockKeys = 1024; // keys x heads between two softmaxes
constexpr std::int64_t kAhead = 4096;     // bytes, at least, from what is read to what is asked for
constexpr int kGroupRows = 4;             // rows that share a conversion

template <typename Element> static inline const Element* row_at(const Run& run, std::int64_t j) {
    return static_cast<const Element*>(run.rows) + j * run.stride;
}

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
        const std::int64_t distance = round_up(kAhead, kFewKeys * stride * item) + share;
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

    std::uintptr_t address_;
    std::int64_t stride_, bytes_;
};

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
template <class V, int Rows, bool Tail, typename Element>
static void dot_keys(const float* query, std::int64_t query_pitch, const Element* row, std::int64_t stride,
                     const std::int32_t* zero_points, std::int64_t keys, std::int64_t dim, float* scores,
                     std::int64_t pitch, const Ahead& ahead) {
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
                     std::int64_t width, const Ahead& ahead) {
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

// Heads take turns after every kFewKeys keys, so that memory is read about in its order. In between, for each block of
// keys: scores of all heads, then their softmax, then their values.
template <class V> class FewRows {
public:
    static std::int64_t scratch(const Attention& a, std::int64_t rows, std::int64_t heads) {
        const std::int64_t block = block_keys(heads);
        return heads * (rows * (round_up(a.dim, V::kWidth) + block) + block) + block;
    }

    static void run(const Attention& a, const Tile& tile, const Partial& first, std::int64_t pitch, float* scratch) {
        FewRows(a, tile, first, pitch, scratch).run();
    }

private:
    FewRows(const Attention& a, const Tile& tile, const Partial& first, std::int64_t pitch, float* scratch)
        : a_(a), tile_(tile), first_(first), partial_pitch_(pitch), rows_(tile_rows(a, tile)),
          pitch_(block_keys(tile.heads)), query_pitch_(round_up(a.dim, V::kWidth)),
          width_(round_up(a.dim, 2 * V::kWidth)), queries_(scratch),
          scores_(queries_ + tile.heads * rows_ * query_pitch_), scales_(scores_ + tile.heads * rows_ * pitch_),
          zero_points_(reinterpret_cast<std::int32_t*>(scales_ + pitch_)) {}

    static std::int64_t block_keys(std::int64_t heads) { return larger(kBlockKeys / heads / 64, 1) * 64; }

    void run() {
        for (std::int64_t head = 0; head < tile_.heads; ++head)
            load_query(head);
        for (begin_ = tile_.key_begin; begin_ < tile_.key_end; begin_ += pitch_) {
            keys_ = smaller(pitch_, tile_.key_end - begin_);
            for_runs(a_.key,
                     [&](const Run& run) { run.quantized ? score_run<std::int8_t>(run) : score_run<float>(run); });
            for (std::int64_t head = 0; head < tile_.heads; ++head)
                weigh(head);
            for_runs(a_.value, [&](const Run& run) { run.quantized ? add<std::int8_t>(run) : add<float>(run); });
        }
    }

    float* query(std::int64_t head) const { return queries_ + head * rows_ * query_pitch_; }
    float* scores(std::int64_t head) const { return scores_ + head * rows_ * pitch_; }
    Partial partial(std::int64_t head) const {
        const std::int64_t offset = head * partial_pitch_;
        return {first_.maximum + offset, first_.sum + offset, first_.values + offset};
    }
    Tile head_tile(std::int64_t head) const {
        Tile tile = tile_;
        tile.kv_head += head;
        return tile;
    }

    void load_query(std::int64_t head) {
        const auto scale = V::set1(a_.scale);
        for (std::int64_t r = 0; r < rows_; ++r) {
            const float* source = query_row(a_, head_tile(head), r);
            float* target = query(head) + r * query_pitch_;
            std::int64_t d = 0;
            for (; d + V::kWidth <= a_.dim; d += V::kWidth)
                V::store(target + d, V::mul(V::load(source + d), scale));
            if (d < a_.dim)
                V::store(target + d, V::mul(V::load(source + d, a_.dim - d), scale));
        }
    }

    // Calls body(run) for the block's runs of the first head, those of the others being alike. Before that, brings the
    // zero points of each head side by side.
    template <typename Body> void for_runs(const CachedRows& rows, const Body& body) {
        Run runs[3];
        const int count = split(a_, rows, tile_.batch, tile_.kv_head, begin_, begin_ + keys_, runs);
        for (int n = 0; n < count; ++n) {
            const Run& run = runs[n];
            for (std::int64_t head = 0; head < tile_.heads; ++head) {
                std::int32_t* target = zero_points_ + head * pitch_;
                for (std::int64_t j = 0, at = head * rows.zero_points.stride[2]; j < run.end - run.begin; ++j)
                    target[j] = run.zero_points != nullptr ? run.zero_points[at + j * run.zero_point_stride] : 0;
            }
            body(run);
        }
    }

    template <typename Element> void score_run(const Run& run) {
        a_.dim % V::kWidth == 0 ? score<Element, false>(run) : score<Element, true>(run);
    }

    // query . (code - zero_point) of a run; the scale comes later.
    template <typename Element, bool Tail> void score(const Run& run) {
        const std::int64_t count = run.end - run.begin, offset = run.begin - begin_;
        for (std::int64_t j = 0; j < count; j += kFewKeys)
            for (std::int64_t head = 0; head < tile_.heads; ++head) {
                const Element* row = row_at<Element>(run, j) + head * run.head_stride;
                const Ahead ahead(row, run.stride, sizeof(Element), a_.dim, head, tile_.heads);
                for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                    dot_keys<V, decltype(rows)::value, Tail>(
                        query(head) + r * query_pitch_, query_pitch_, row, run.stride, zero_points_ + head * pitch_ + j,
                        smaller(kFewKeys, count - j), a_.dim, scores(head) + r * pitch_ + offset + j, pitch_, ahead);
                });
            }
    }

    // Brings the scales of a head side by side, those behind the keys 0.
    void load_scales(const CachedRows& rows, std::int64_t head) {
        Run runs[3];
        const int count = split(a_, rows, tile_.batch, tile_.kv_head + head, begin_, begin_ + keys_, runs);
        for (int n = 0; n < count; ++n)
            for (std::int64_t j = runs[n].begin; j < runs[n].end; ++j)
                scales_[j - begin_] =
                    runs[n].quantized ? runs[n].scales[(j - runs[n].begin) * runs[n].scale_stride] : 1.0f;
        for (std::int64_t j = keys_; j < round_up(keys_, V::kWidth); ++j)
            scales_[j] = 0;
    }

    // Scores to weights, times the scales of the values, for the rows of a head.
    void weigh(std::int64_t head) {
        const Tile tile = head_tile(head);
        const Partial out = partial(head);
        load_scales(a_.key, head);
        for (std::int64_t r = 0; r < rows_; ++r) {
            float* row = scores(head) + r * pitch_;
            for (std::int64_t j = keys_; j < round_up(keys_, V::kWidth); ++j)
                row[j] = 0;
            for (std::int64_t j = 0; j < keys_; j += V::kWidth)
                V::store(row + j, V::mul(V::load(row + j), V::load(scales_ + j)));
            const std::int64_t visible = visible_keys(a_, tile, r, begin_, keys_);
            for (std::int64_t j = visible; j < keys_; ++j)
                row[j] = kHidden;
            if (a_.mask.data != nullptr)
                apply_mask<V>(a_, tile.batch, tile.row_begin + r / a_.group, tile.kv_head * a_.group + r % a_.group,
                              begin_, visible, row);
            rescale<V>(out.values + r * width_, width_, softmax<V>(row, keys_, out.maximum[r], out.sum[r]));
        }
        load_scales(a_.value, head);
        for (std::int64_t r = 0; r < rows_; ++r)
            scale_weights(scores(head) + r * pitch_);
    }

    // The scales may be NaN for a key the row does not see.
    void scale_weights(float* weights) const {
        for (std::int64_t j = 0; j < keys_; j += V::kWidth) {
            const auto weight = V::load(weights + j);
            V::store(weights + j, V::where_nonzero(weight, V::mul(weight, V::load(scales_ + j)), V::zero()));
        }
    }

    // Weights times the values of a run.
    template <typename Element> void add(const Run& run) {
        for (std::int64_t j = 0; j < run.end - run.begin; j += kFewKeys)
            for (std::int64_t head = 0; head < tile_.heads; ++head)
                add_rows(run, j, head, row_at<Element>(run, j) + head * run.head_stride);
    }

    template <typename Element> void add_rows(const Run& run, std::int64_t j, std::int64_t head, const Element* row) {
        const std::int64_t keys = smaller(kFewKeys, run.end - run.begin - j);
        const float* weights = scores(head) + run.begin - begin_ + j;
        float* values = partial(head).values;
        if (sizeof(Element) == sizeof(float) && hides(a_, tile_) &&
            has_nonfinite<V>(reinterpret_cast<const float*>(row), run.stride, keys, a_.dim))
            return add_visible(row, run.stride, weights, keys, values);
        const Ahead ahead(row, run.stride, sizeof(Element), a_.dim, head, tile_.heads);
        for_row_groups(rows_, [&](auto rows, std::int64_t r) {
            add_keys<V, decltype(rows)::value>(weights + r * pitch_, pitch_, row, run.stride,
                                               zero_points_ + head * pitch_ + j, keys, a_.dim, values + r * width_,
                                               width_, ahead);
        });
    }

    // Leaves out keys of weight 0, which may hold what no factor makes vanish.
    template <typename Element>
    void add_visible(const Element* row, std::int64_t stride, const float* weights, std::int64_t keys,
                     float* values) const {
        for (std::int64_t r = 0; r < rows_; ++r)
            for (std::int64_t j = 0; j < keys; ++j)
                for (std::int64_t d = 0; weights[r * pitch_ + j] != 0 && d < a_.dim; ++d)
                    values[r * width_ + d] += weights[r * pitch_ + j] * static_cast<float>(row[j * stride + d]);
    }

    const Attention& a_;
    const Tile& tile_;
    const Partial& first_; // of the first head
    const std::int64_t partial_pitch_, rows_, pitch_, query_pitch_, width_;
    float* queries_;            // [heads, rows, query_pitch], scaled, padded with 0
    float* scores_;             // [heads, rows, pitch], then weights
    float* scales_;             // [pitch], of one head
    std::int32_t* zero_points_; // [heads, pitch], of one run

    std::int64_t begin_ = 0, keys_ = 0; // the block
};

} // namespace gr::simd
