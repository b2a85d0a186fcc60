// Attention for many rows a key/value head (prefill), as two small matrix products for each block of keys.
//
// A block of keys is unpacked to floats once for all rows of the tile: keys transposed into panels [D][2 vectors of
// keys], values in panels [keys][2 vectors of D]. Both products then run the same register tile, kTileRows rows by two
// vectors: a broadcast of one factor times two columns of the other. Rows are in the order of the sequence, so with a
// causal mask the tiles at the front of a block of rows see fewer keys and stop early.
#pragma once

#include "few.h"

namespace gr::simd {

constexpr std::int64_t kManyKeys = 64; // keys a block; the row pitch of the scores

// sums[r][c] += sum over n < count of left[n * LeftStep + r * LeftPitch] * right[n * RightPitch + c].
template <class V, int Rows, std::int64_t LeftStep, std::int64_t LeftPitch>
static inline void multiply(const float* left, const float* right, std::int64_t count,
                            typename V::Floats (&sums)[Rows][2]) {
    constexpr std::int64_t kPanel = 2 * V::kWidth;
    for (std::int64_t n = 0; n < count; ++n) {
        const auto first = V::load(right + n * kPanel), second = V::load(right + n * kPanel + V::kWidth);
        for (int r = 0; r < Rows; ++r) {
            const auto factor = V::set1(left[n * LeftStep + r * LeftPitch]);
            sums[r][0] = V::fma(factor, first, sums[r][0]);
            sums[r][1] = V::fma(factor, second, sums[r][1]);
        }
    }
}

template <class V> class ManyRows {
    using Floats = typename V::Floats;
    static constexpr std::int64_t kPanel = 2 * V::kWidth;
    static constexpr int kTile = V::kTileRows;
    // From one panel of values to the next: a line more than the panel, so that they do not share cache sets.
    static constexpr std::int64_t kValuePanel = kManyKeys * kPanel + 16;

public:
    static std::int64_t scratch(const Attention& a, std::int64_t rows) {
        const std::int64_t padded = round_up(rows, kTile), width = round_up(a.dim, kPanel);
        return padded * a.dim + padded * kManyKeys + kManyKeys * a.dim + width / kPanel * kValuePanel + 2 * kManyKeys +
               64;
    }

    static void run(const Attention& a, const Tile& tile, const Partial& out, float* scratch) {
        ManyRows(a, tile, out, scratch).run();
    }

private:
    ManyRows(const Attention& a, const Tile& tile, const Partial& out, float* scratch)
        : a_(a), tile_(tile), out_(out), rows_(tile_rows(a, tile)), width_(round_up(a.dim, kPanel)), query_(scratch),
          scores_(query_ + round_up(round_up(rows_, kTile) * a.dim, 16)),
          keys_(scores_ + round_up(rows_, kTile) * kManyKeys), values_(keys_ + kManyKeys * a.dim),
          scales_(values_ + width_ / kPanel * kValuePanel),
          zero_points_(reinterpret_cast<std::int32_t*>(scales_ + kManyKeys)) {}

    void run() {
        load_query();
        Run key_runs[3], value_runs[3];
        const auto& t = tile_;
        const int count = split(a_, a_.key, t.batch, t.kv_head, t.key_begin, t.key_end, key_runs);
        split(a_, a_.value, t.batch, t.kv_head, t.key_begin, t.key_end, value_runs);
        for (int n = 0; n < count; ++n)
            for (std::int64_t j = 0; j < key_runs[n].end - key_runs[n].begin; j += kManyKeys)
                attend_block(key_runs[n], value_runs[n], j);
    }

    // The rows of one register tile side by side: [D][rows of the tile], scaled.
    void load_query() {
        for (std::int64_t first = 0; first < rows_; first += kTile) {
            const std::int64_t count = smaller(kTile, rows_ - first);
            for (std::int64_t r = 0; r < count; ++r) {
                const float* source = query_row(a_, tile_, first + r);
                float* target = query_ + first * a_.dim + r;
                for (std::int64_t d = 0; d < a_.dim; ++d)
                    target[d * count] = source[d] * a_.scale;
            }
        }
    }

    // Keys [j, j + kManyKeys) of a run, or as many as there are.
    void attend_block(const Run& key_run, const Run& value_run, std::int64_t j) {
        const std::int64_t begin = key_run.begin + j, count = smaller(kManyKeys, key_run.end - begin);
        key_run.quantized ? pack_keys<std::int8_t>(key_run, j, count) : pack_keys<float>(key_run, j, count);
        const bool finite = value_run.quantized ? pack_values<std::int8_t>(value_run, j, count)
                                                : pack_values<float>(value_run, j, count);
        for (std::int64_t panel = 0; panel < count; panel += kPanel)
            for_tiles([&](auto rows, std::int64_t first) {
                if (tile_keys(first, decltype(rows)::value, begin, count) > panel)
                    score<decltype(rows)::value>(first, panel);
            });
        for (std::int64_t r = 0; r < rows_; ++r)
            weigh(r, begin, count);
        if (!finite && hides(a_, tile_))
            return add_visible(begin, count);
        for (std::int64_t panel = 0; panel < width_; panel += kPanel)
            for_tiles([&](auto rows, std::int64_t first) {
                add<decltype(rows)::value>(first, panel, tile_keys(first, decltype(rows)::value, begin, count));
            });
    }

    // Calls body(integral constant of rows, first row) for each register tile.
    template <typename Body> void for_tiles(const Body& body) const {
        std::int64_t first = 0;
        for (; first + kTile <= rows_; first += kTile)
            body(RowCount<kTile>(), first);
        last_tile<kTile - 1>(first, body);
    }
    template <int Rows, typename Body> void last_tile(std::int64_t first, const Body& body) const {
        if constexpr (Rows > 0) {
            if (rows_ - first == Rows)
                body(RowCount<Rows>(), first);
            else
                last_tile<Rows - 1>(first, body);
        }
    }

    // How many keys of the block the rows of a register tile see: those of its last row.
    std::int64_t tile_keys(std::int64_t first, std::int64_t rows, std::int64_t begin, std::int64_t count) const {
        return visible_keys(a_, tile_, first + rows - 1, begin, count);
    }

    void load_parameters(const Run& run, std::int64_t j, std::int64_t count) {
        for (std::int64_t k = 0; k < kManyKeys; ++k) {
            const bool present = run.quantized && k < count;
            scales_[k] = present ? run.scales[(j + k) * run.scale_stride] : 0.0f;
            zero_points_[k] =
                present && run.zero_points != nullptr ? run.zero_points[(j + k) * run.zero_point_stride] : 0;
        }
    }

    template <typename Element> void pack_keys(const Run& run, std::int64_t j, std::int64_t count) {
        load_parameters(run, j, count);
        const Element* row = row_at<Element>(run, j);
        for (std::int64_t k = 0; k < round_up(count, kPanel); k += V::kPackedKeys)
            V::pack_keys(row + smaller(k, count) * run.stride, run.stride, count - k, scales_ + k, zero_points_ + k,
                         a_.dim, keys_ + k / kPanel * kPanel * a_.dim + k % kPanel, kPanel);
    }

    // Returns whether all of them are finite.
    template <typename Element> bool pack_values(const Run& run, std::int64_t j, std::int64_t count) {
        load_parameters(run, j, count);
        auto check = V::zero();
        for (std::int64_t k = 0; k < count; ++k) {
            const Element* row = row_at<Element>(run, j + k);
            const auto scale = V::set1(run.quantized ? scales_[k] : 1.0f);
            const auto zero_point = V::set1(zero_points_[k]);
            for (std::int64_t d = 0; d < width_; d += V::kWidth) {
                const auto value = d + V::kWidth <= a_.dim ? V::values(row + d, zero_point)
                                   : d < a_.dim            ? V::values(row + d, zero_point, a_.dim - d)
                                                           : V::zero();
                const auto scaled = V::mul(value, scale);
                check = V::fma(scaled, V::zero(), check);
                V::store(values_ + d / kPanel * kValuePanel + k * kPanel + d % kPanel, scaled);
            }
        }
        return !V::any_nan(check);
    }

    // Scores of the rows of a register tile for a panel of keys.
    template <int Rows> void score(std::int64_t first, std::int64_t panel) {
        Floats sums[Rows][2];
        for (int r = 0; r < Rows; ++r)
            sums[r][0] = sums[r][1] = V::zero();
        multiply<V, Rows, Rows, 1>(query_ + first * a_.dim, keys_ + panel * a_.dim, a_.dim, sums);
        for (int r = 0; r < Rows; ++r) {
            float* target = scores_ + (first + r) * kManyKeys + panel;
            V::store(target, sums[r][0]);
            V::store(target + V::kWidth, sums[r][1]);
        }
    }

    // Scores to weights, for one row.
    void weigh(std::int64_t r, std::int64_t begin, std::int64_t count) {
        float* scores = scores_ + r * kManyKeys;
        const std::int64_t visible = visible_keys(a_, tile_, r, begin, count);
        float factor = 1;
        if (visible > 0) {
            if (a_.mask.data != nullptr)
                apply_mask<V>(a_, tile_.batch, tile_.row_begin + r / a_.group, tile_.kv_head * a_.group + r % a_.group,
                              begin, visible, scores);
            factor = softmax<V>(scores, visible, out_.maximum[r], out_.sum[r]);
        }
        for (std::int64_t k = visible; k < count; ++k)
            scores[k] = 0;
        rescale<V>(out_.values + r * width_, width_, factor);
    }

    // Weights times a panel of values, for the rows of a register tile.
    template <int Rows> void add(std::int64_t first, std::int64_t panel, std::int64_t count) {
        Floats sums[Rows][2];
        for (int r = 0; r < Rows; ++r) {
            const float* source = out_.values + (first + r) * width_ + panel;
            sums[r][0] = V::load(source);
            sums[r][1] = V::load(source + V::kWidth);
        }
        multiply<V, Rows, 1, kManyKeys>(scores_ + first * kManyKeys, values_ + panel / kPanel * kValuePanel, count,
                                        sums);
        for (int r = 0; r < Rows; ++r) {
            float* target = out_.values + (first + r) * width_ + panel;
            V::store(target, sums[r][0]);
            V::store(target + V::kWidth, sums[r][1]);
        }
    }

    // The same for all rows where values are infinite or NaN: leaves out keys of weight 0, which such a value would
    // reach all the same.
    void add_visible(std::int64_t begin, std::int64_t count) {
        for (std::int64_t r = 0; r < rows_; ++r)
            for (std::int64_t k = 0; k < visible_keys(a_, tile_, r, begin, count); ++k) {
                const float weight = scores_[r * kManyKeys + k];
                for (std::int64_t d = 0; weight != 0 && d < a_.dim; ++d)
                    out_.values[r * width_ + d] += weight * values_[d / kPanel * kValuePanel + k * kPanel + d % kPanel];
            }
    }

    const Attention& a_;
    const Tile& tile_;
    const Partial& out_;
    const std::int64_t rows_, width_;
    float* query_;              // register tiles of [D][rows]
    float* scores_;             // [rows, kManyKeys], then weights
    float* keys_;               // panels [D][kPanel]
    float* values_;             // panels [kManyKeys][kPanel], kValuePanel apart
    float* scales_;             // [kManyKeys]
    std::int32_t* zero_points_; // [kManyKeys]
};

} // namespace gr::simd
