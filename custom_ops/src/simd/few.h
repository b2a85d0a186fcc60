// Attention for few rows a key/value head (decoding): the cache streams by once, and every row of keys or values is
// converted to floats in registers, or in the first-level cache, and used for all rows of the tile.
#pragma once

#include "products.h"
#include "softmax.h"
#include "unpack.h"

namespace gr::simd {

constexpr std::int64_t kFewRows = 8;
constexpr std::int64_t kBlockKeys = 1024; // keys x heads between two softmaxes

static_assert(kFewKeys <= kUnpackRows);

// Heads take turns after every kFewKeys keys, so that memory is read about in its order. In between, for each block of
// keys: scores of all heads, then their softmax, then their values.
template <class V> class FewRows {
public:
    static std::int64_t scratch(const Attention& a, std::int64_t rows, std::int64_t heads) {
        const std::int64_t block = block_keys(heads);
        return heads * (rows * (round_up(a.dim, V::kWidth) + block) + block) + block + Unpacker<V>::scratch(a.dim);
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
          zero_points_(reinterpret_cast<std::int32_t*>(scales_ + pitch_)),
          unpack_(a.dim, scales_ + pitch_ + tile.heads * pitch_) {}

    static std::int64_t block_keys(std::int64_t heads) { return larger(kBlockKeys / heads / 64, 1) * 64; }

    void run() {
        for (std::int64_t head = 0; head < tile_.heads; ++head)
            for (std::int64_t r = 0; r < rows_; ++r)
                load_query<V>(a_, head_tile(head), r, query(head) + r * query_pitch_);
        for (begin_ = tile_.key_begin; begin_ < tile_.key_end; begin_ += pitch_) {
            keys_ = smaller(pitch_, tile_.key_end - begin_);
            for_runs(a_.key, [&](const Run& run, auto type) { score<decltype(type)>(run); });
            for (std::int64_t head = 0; head < tile_.heads; ++head)
                weigh(head);
            for_runs(a_.value, [&](const Run& run, auto type) { add<decltype(type)>(run); });
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

    // Calls body(run, its type) for the block's runs of the first head, those of the others being alike. Before that,
    // brings the zero points of each head side by side.
    template <typename Body> void for_runs(const CachedRows& rows, const Body& body) {
        Run runs[3];
        const int count = split(a_, rows, tile_.batch, tile_.kv_head, begin_, begin_ + keys_, runs);
        for (int n = 0; n < count; ++n) {
            const Run& run = runs[n];
            for (std::int64_t head = 0; run.access == Access::Int8 && head < tile_.heads; ++head)
                run.copy_zero_points(head, 0, run.count(), zero_points_ + head * pitch_);
            with_access(run, [&](auto type) { body(run, type); });
        }
    }

    // Calls body(rows, stride, elements a row, head, j, ahead) for every kFewKeys keys of a run, from number j on, and
    // every head in turn.
    template <typename T, typename Body> void for_rows(const Run& run, const Body& body) {
        for (std::int64_t j = 0; j < run.count(); j += kFewKeys)
            for (std::int64_t head = 0; head < tile_.heads; ++head) {
                if constexpr (std::is_same_v<T, Codes>) {
                    const auto* row = row_at<std::uint8_t>(run, j, head);
                    const std::int64_t bytes = run.element == Element::Int4 ? a_.dim / 2 : a_.dim;
                    const Ahead ahead(row, run.stride, 1, bytes, head, tile_.heads);
                    const float* rows = unpack_(run, head, j, smaller(kFewKeys, run.count() - j));
                    body(rows, unpack_.pitch(), unpack_.pitch(), head, j, ahead);
                } else {
                    const T* row = row_at<T>(run, j, head);
                    const Ahead ahead(row, run.stride, sizeof(T), a_.dim, head, tile_.heads);
                    body(row, run.stride, a_.dim, head, j, ahead);
                }
            }
    }

    // query . row of a run; scales of Access::Int8 come later.
    template <typename T> void score(const Run& run) {
        std::is_same_v<T, Codes> || a_.dim % V::kWidth == 0 ? score_rows<T, false>(run) : score_rows<T, true>(run);
    }

    template <typename T, bool Tail> void score_rows(const Run& run) {
        for_rows<T>(run, [&](const auto* row, std::int64_t stride, std::int64_t dim, std::int64_t head, std::int64_t j,
                             const Ahead& ahead) {
            float* target = scores(head) + run.begin - begin_ + j;
            for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                dot_keys<V, decltype(rows)::value, Tail>(
                    query(head) + r * query_pitch_, query_pitch_, row, stride, zero_points_ + head * pitch_ + j,
                    smaller(kFewKeys, run.count() - j), dim, target + r * pitch_, pitch_, ahead);
            });
        });
    }

    // Brings the scales of a head side by side, those behind the keys 0.
    void load_scales(const CachedRows& rows, std::int64_t head) {
        Run runs[3];
        const int count = split(a_, rows, tile_.batch, tile_.kv_head + head, begin_, begin_ + keys_, runs);
        for (int n = 0; n < count; ++n)
            runs[n].copy_scales(0, runs[n].count(), scales_ + runs[n].begin - begin_);
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
            finish_scores(tile, r, row);
            rescale<V>(out.values + r * width_, width_, softmax<V>(row, keys_, out.maximum[r], out.sum[r]));
        }
        load_scales(a_.value, head);
        for (std::int64_t r = 0; r < rows_; ++r)
            scale_weights(scores(head) + r * pitch_);
    }

    // Products of a row with the keys to scores: scales, softcap, and kHidden for keys that the row does not see.
    void finish_scores(const Tile& tile, std::int64_t r, float* row) const {
        for (std::int64_t j = keys_; j < round_up(keys_, V::kWidth); ++j)
            row[j] = 0;
        for (std::int64_t j = 0; j < keys_; j += V::kWidth)
            V::store(row + j, V::mul(V::load(row + j), V::load(scales_ + j)));
        if (a_.softcap > 0)
            cap<V>(a_.softcap, keys_, row);
        const std::int64_t visible = visible_keys(a_, tile, r, begin_, keys_);
        const std::int64_t before = keys_before_window(a_, tile, r, begin_, keys_);
        for (std::int64_t j = 0; j < before; ++j)
            row[j] = kHidden;
        for (std::int64_t j = visible; j < keys_; ++j)
            row[j] = kHidden;
        if (a_.mask.data != nullptr && before < visible)
            apply_mask<V>(a_, QueryRow(a_, tile, r), begin_ + before, visible - before, row + before);
    }

    // The scales may be NaN for a key the row does not see.
    void scale_weights(float* weights) const {
        for (std::int64_t j = 0; j < keys_; j += V::kWidth) {
            const auto weight = V::load(weights + j);
            V::store(weights + j, V::where_nonzero(weight, V::mul(weight, V::load(scales_ + j)), V::zero()));
        }
    }

    // Weights times the values of a run.
    template <typename T> void add(const Run& run) {
        for_rows<T>(run, [&](const auto* row, std::int64_t stride, std::int64_t dim, std::int64_t head, std::int64_t j,
                             const Ahead& ahead) {
            const std::int64_t keys = smaller(kFewKeys, run.count() - j);
            const float* weights = scores(head) + run.begin - begin_ + j;
            float* values = partial(head).values;
            if constexpr (!std::is_same_v<T, std::int8_t>)
                if (hides(a_, tile_) && has_nonfinite<V>(row, stride, keys, dim))
                    return add_visible(row, stride, weights, keys, dim, values);
            for_row_groups(rows_, [&](auto rows, std::int64_t r) {
                add_keys<V, decltype(rows)::value>(weights + r * pitch_, pitch_, row, stride,
                                                   zero_points_ + head * pitch_ + j, keys, dim, values + r * width_,
                                                   width_, ahead);
            });
        });
    }

    // Leaves out keys of weight 0, which may hold what no factor makes vanish.
    template <typename T>
    void add_visible(const T* row, std::int64_t stride, const float* weights, std::int64_t keys, std::int64_t dim,
                     float* values) const {
        const auto none = V::set1(std::int32_t{0});
        for (std::int64_t r = 0; r < rows_; ++r)
            for (std::int64_t j = 0; j < keys; ++j) {
                const float weight = weights[r * pitch_ + j];
                for (std::int64_t d = 0; weight != 0 && d < dim; d += V::kWidth) {
                    const T* at = row + j * stride + d;
                    const auto value = d + V::kWidth <= dim ? V::values(at, none) : V::values(at, none, dim - d);
                    float* sum = values + r * width_ + d;
                    V::store(sum, V::fma(V::set1(weight), value, V::load(sum)));
                }
            }
    }

    const Attention& a_;
    const Tile& tile_;
    const Partial& first_; // of the first head
    const std::int64_t partial_pitch_, rows_, pitch_, query_pitch_, width_;
    float* queries_;            // [heads, rows, query_pitch], scaled, padded with 0
    float* scores_;             // [heads, rows, pitch], then weights
    float* scales_;             // [pitch], of one head
    std::int32_t* zero_points_; // [heads, pitch], of one run of Access::Int8
    const Unpacker<V> unpack_;

    std::int64_t begin_ = 0, keys_ = 0; // the block
};

} // namespace gr::simd
