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
    static_assert(V::kPackedKeys == kUnpackRows);
    // From one panel of values to the next: a line more than the panel, so that they do not share cache sets.
    static constexpr std::int64_t kValuePanel = kManyKeys * kPanel + 16;

public:
    static std::int64_t scratch(const Attention& a, std::int64_t rows) {
        const std::int64_t padded = round_up(rows, kTile), width = round_up(a.dim, kPanel);
        return padded * a.dim + padded * kManyKeys + kManyKeys * a.dim + width / kPanel * kValuePanel + 2 * kManyKeys +
               64 + Unpacker<V>::scratch(a.dim);
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
          zero_points_(reinterpret_cast<std::int32_t*>(scales_ + kManyKeys)), unpack_(a.dim, scales_ + 2 * kManyKeys) {}

    void run() {
        load_queries();
        Run key_runs[3], value_runs[3];
        const auto& t = tile_;
        const int count = split(a_, a_.key, t.batch, t.kv_head, t.key_begin, t.key_end, key_runs);
        split(a_, a_.value, t.batch, t.kv_head, t.key_begin, t.key_end, value_runs);
        for (int n = 0; n < count; ++n)
            for (std::int64_t j = 0; j < key_runs[n].count(); j += kManyKeys)
                attend_block(key_runs[n], value_runs[n], j);
    }

    // The rows of one register tile side by side: [D][rows of the tile], scaled.
    void load_queries() {
        float* const row = keys_; // not in use yet
        for (std::int64_t first = 0; first < rows_; first += kTile) {
            const std::int64_t count = smaller(kTile, rows_ - first);
            for (std::int64_t r = 0; r < count; ++r) {
                load_query<V>(a_, tile_, first + r, row);
                for (std::int64_t d = 0; d < a_.dim; ++d)
                    query_[first * a_.dim + r + d * count] = row[d];
            }
        }
    }

    // Keys [j, j + kManyKeys) of a run, or as many as there are.
    void attend_block(const Run& key_run, const Run& value_run, std::int64_t j) {
        const std::int64_t begin = key_run.begin + j, count = smaller(kManyKeys, key_run.end - begin);
        pack_keys(key_run, j, count);
        const bool finite = pack_values(value_run, j, count);
        for (std::int64_t panel = 0; panel < count; panel += kPanel)
            for_tiles([&](auto rows, std::int64_t first) {
                constexpr int kRows = decltype(rows)::value;
                if (tile_end(first, kRows, begin, count) > panel && tile_begin(first, begin, count) < panel + kPanel)
                    score<kRows>(first, panel);
            });
        for (std::int64_t r = 0; r < rows_; ++r)
            weigh(r, begin, count);
        if (!finite && hides(a_, tile_))
            return add_visible(begin, count);
        for (std::int64_t panel = 0; panel < width_; panel += kPanel)
            for_tiles([&](auto rows, std::int64_t first) {
                constexpr int kRows = decltype(rows)::value;
                const std::int64_t from = tile_begin(first, begin, count);
                if (from < tile_end(first, kRows, begin, count))
                    add<kRows>(first, panel, from, tile_end(first, kRows, begin, count));
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

    // The keys of the block that some row of a register tile sees: those from where its first row begins to where its
    // last row ends.
    std::int64_t tile_begin(std::int64_t first, std::int64_t begin, std::int64_t count) const {
        return keys_before_window(a_, tile_, first, begin, count);
    }
    std::int64_t tile_end(std::int64_t first, std::int64_t rows, std::int64_t begin, std::int64_t count) const {
        return visible_keys(a_, tile_, first + rows - 1, begin, count);
    }

    // Scales and zero points of Access::Int8.
    void load_parameters(const Run& run, std::int64_t j, std::int64_t count) {
        run.copy_scales(j, count, scales_);
        run.copy_zero_points(0, j, count, zero_points_);
        for (std::int64_t k = count; k < kManyKeys; ++k) {
            scales_[k] = 0;
            zero_points_[k] = 0;
        }
    }

    void pack_keys(const Run& run, std::int64_t j, std::int64_t count) {
        if (run.access == Access::Int8)
            load_parameters(run, j, count);
        for (std::int64_t k = 0; k < round_up(count, kPanel); k += kUnpackRows) {
            const std::int64_t present = larger(count - k, 0);
            const auto pack = [&](const auto* row, std::int64_t stride) {
                V::pack_keys(row, stride, present, scales_ + k, zero_points_ + k, a_.dim,
                             keys_ + k / kPanel * kPanel * a_.dim + k % kPanel, kPanel);
            };
            if (run.access == Access::Int8)
                pack(row_at<std::int8_t>(run, j + smaller(k, count)), run.stride);
            else if (run.access == Access::Float)
                pack(row_at<float>(run, j + smaller(k, count)), run.stride);
            else
                pack(unpack_(run, 0, j + k, smaller(kUnpackRows, present)), unpack_.pitch());
        }
    }

    // Returns whether all of them are finite.
    bool pack_values(const Run& run, std::int64_t j, std::int64_t count) {
        if (run.access == Access::Int8)
            load_parameters(run, j, count);
        auto check = V::zero();
        for (std::int64_t k = 0; k < count; k += kUnpackRows) {
            const std::int64_t rows = smaller(kUnpackRows, count - k);
            if (run.access == Access::Int8)
                pack_rows(row_at<std::int8_t>(run, j + k), run.stride, k, rows, check);
            else if (run.access == Access::Float)
                pack_rows(row_at<float>(run, j + k), run.stride, k, rows, check);
            else
                pack_rows(unpack_(run, 0, j + k, rows), unpack_.pitch(), k, rows, check);
        }
        return !V::any_nan(check);
    }

    template <typename T>
    void pack_rows(const T* row, std::int64_t stride, std::int64_t k, std::int64_t rows, Floats& check) {
        for (const std::int64_t end = k + rows; k < end; ++k, row += stride) {
            const auto zero_point = V::set1(zero_points_[k]);
            for (std::int64_t d = 0; d < width_; d += V::kWidth) {
                auto value = d + V::kWidth <= a_.dim ? V::values(row + d, zero_point)
                             : d < a_.dim            ? V::values(row + d, zero_point, a_.dim - d)
                                                     : V::zero();
                if constexpr (std::is_same_v<T, std::int8_t>)
                    value = V::mul(value, V::set1(scales_[k]));
                check = V::fma(value, V::zero(), check);
                V::store(values_ + d / kPanel * kValuePanel + k * kPanel + d % kPanel, value);
            }
        }
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
        const std::int64_t before = keys_before_window(a_, tile_, r, begin, count);
        float factor = 1;
        if (before < visible) {
            const std::int64_t whole = before / V::kWidth * V::kWidth;
            if (a_.softcap > 0)
                cap<V>(a_.softcap, visible - whole, scores + whole);
            for (std::int64_t k = whole; k < before; ++k)
                scores[k] = kHidden;
            if (a_.mask.data != nullptr)
                apply_mask<V>(a_, QueryRow(a_, tile_, r), begin + before, visible - before, scores + before);
            factor = softmax<V>(scores + whole, visible - whole, out_.maximum[r], out_.sum[r]);
        }
        const std::int64_t first = before < visible ? before : count;
        for (std::int64_t k = 0; k < first; ++k)
            scores[k] = 0;
        for (std::int64_t k = visible; k < count; ++k)
            scores[k] = 0;
        rescale<V>(out_.values + r * width_, width_, factor);
    }

    // Weights times a panel of values of the keys [begin, end), for the rows of a register tile.
    template <int Rows> void add(std::int64_t first, std::int64_t panel, std::int64_t begin, std::int64_t end) {
        Floats sums[Rows][2];
        for (int r = 0; r < Rows; ++r) {
            const float* source = out_.values + (first + r) * width_ + panel;
            sums[r][0] = V::load(source);
            sums[r][1] = V::load(source + V::kWidth);
        }
        multiply<V, Rows, 1, kManyKeys>(scores_ + first * kManyKeys + begin,
                                        values_ + panel / kPanel * kValuePanel + begin * kPanel, end - begin, sums);
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
    const Unpacker<V> unpack_;
};

} // namespace gr::simd
