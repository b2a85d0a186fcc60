// What both attention kernels share: where rows come from, masks, and the softmax over a part of the keys.
//
// Softmax in parts: for scores s_j and a running maximum m, sum l = sum exp(s_j - m) and values a = sum exp(s_j - m)
// v_j, a part with maximum m' > m first scales l and a by exp(m - m'). The output is a / l. A row that has seen no key
// has m = minus infinity and l = 0. A NaN score makes l NaN, and with it the row.
#pragma once

#include <limits>

#include "../attention.h"

namespace gr::simd {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Keys or values of consecutive positions that lie in one place.
struct Run {
    std::int64_t begin, end;  // positions
    const void* rows;         // of the first; int8 when quantized, else float
    std::int64_t stride;      // elements from one row to the next
    std::int64_t head_stride; // and from one head to the next
    bool quantized;
    const float* scales; // of the first, and then every scale_stride
    std::int64_t scale_stride;
    const std::int8_t* zero_points; // or NULL
    std::int64_t zero_point_stride;
};

static inline Run cache_run(const CachedRows& rows, std::int64_t b, std::int64_t h, std::int64_t begin,
                            std::int64_t end) {
    Run run{begin, end, nullptr, rows.cache.stride[1], rows.cache.stride[2], rows.quantized, nullptr, 0, nullptr, 0};
    if (!rows.quantized) {
        run.rows = at<const float>(rows.cache, b, begin, h);
        return run;
    }
    run.rows = at<const std::int8_t>(rows.cache, b, begin, h);
    run.scales = at<const float>(rows.scales, b, begin, h);
    run.scale_stride = rows.scales.stride[1];
    if (rows.zero_points.data != nullptr) {
        run.zero_points = at<const std::int8_t>(rows.zero_points, b, begin, h);
        run.zero_point_stride = rows.zero_points.stride[1];
    }
    return run;
}

// Positions [begin, end) as at most three runs: the cache before the recent rows, those, and the cache behind them.
static inline int split(const Attention& a, const CachedRows& rows, std::int64_t b, std::int64_t h, std::int64_t begin,
                        std::int64_t end, Run (&runs)[3]) {
    int count = 0;
    const bool has_recent = rows.recent.data != nullptr;
    const std::int64_t start = has_recent ? position(a.start, b) : end, stop = has_recent ? start + a.rows : end;
    if (begin < smaller(end, start))
        runs[count++] = cache_run(rows, b, h, begin, smaller(end, start));
    const std::int64_t from = larger(begin, start), to = smaller(end, stop);
    if (from < to)
        runs[count++] = {from,
                         to,
                         at<const float>(rows.recent, b, from - start, h),
                         rows.recent.stride[1],
                         rows.recent.stride[2],
                         false,
                         nullptr,
                         0,
                         nullptr,
                         0};
    if (larger(begin, stop) < end)
        runs[count++] = cache_run(rows, b, h, larger(begin, stop), end);
    return count;
}

// Adds the mask of keys [begin, begin + count) to the scores of one row; hidden keys become kHidden whatever they were.
template <class V>
static void apply_mask(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t begin,
                       std::int64_t count, float* scores) {
    const std::int64_t stride = a.mask.stride[3];
    std::int64_t j = 0;
    if (a.mask_is_bool) {
        const std::uint8_t* mask = at<const std::uint8_t>(a.mask, b, i, h, begin);
        for (; stride == 1 && j + V::kWidth <= count; j += V::kWidth)
            V::store(scores + j, V::where_byte(mask + j, V::load(scores + j), V::set1(kHidden)));
        for (; j < count; ++j)
            scores[j] = mask[j * stride] != 0 ? scores[j] : kHidden;
        return;
    }
    const float* mask = at<const float>(a.mask, b, i, h, begin);
    for (; stride == 1 && j + V::kWidth <= count; j += V::kWidth)
        V::store(scores + j, V::add_bias(V::load(scores + j), V::load(mask + j), V::set1(kHidden)));
    for (; j < count; ++j)
        scores[j] = mask[j * stride] == kHidden ? kHidden : scores[j] + mask[j * stride];
}

// Makes weights exp(score - maximum) of the scores of `count` more keys and updates the row's maximum and sum. Returns
// the factor for values summed so far. The scores up to the next multiple of the vector width are overwritten.
template <class V> static float softmax(float* scores, std::int64_t count, float& maximum, float& sum) {
    const std::int64_t padded = round_up(count, V::kWidth);
    for (std::int64_t j = count; j < padded; ++j)
        scores[j] = kHidden;
    auto highest = V::set1(maximum), total = V::zero();
    for (std::int64_t j = 0; j < padded; j += V::kWidth) {
        const auto score = V::load(scores + j);
        highest = V::max(score, highest);
        total = V::add(total, score);
    }
    const float largest = V::max(highest);
    if (largest == kHidden) {
        // Nothing to see, unless all that is visible is NaN: minus infinities sum to minus infinity.
        if (V::any_nan(total))
            sum = std::numeric_limits<float>::quiet_NaN();
        for (std::int64_t j = 0; j < padded; j += V::kWidth)
            V::store(scores + j, V::zero());
        return 1;
    }
    const float factor = V::exp(maximum - largest);
    const auto shift = V::set1(largest);
    total = V::zero();
    for (std::int64_t j = 0; j < padded; j += V::kWidth) {
        const auto weight = V::exp(V::sub(V::load(scores + j), shift));
        V::store(scores + j, weight);
        total = V::add(total, weight);
    }
    maximum = largest;
    sum = sum * factor + V::sum(total);
    return factor;
}

// Values times the factor that `softmax` gives.
template <class V> static inline void rescale(float* values, std::int64_t width, float factor) {
    if (factor != 1)
        for (std::int64_t d = 0; d < width; d += V::kWidth)
            V::store(values + d, V::mul(V::load(values + d), V::set1(factor)));
}

// The query rows of a tile times the scale: row r of `out` is row r / group of the tile and head r % group of the
// group.
static inline const float* query_row(const Attention& a, const Tile& tile, std::int64_t r) {
    return at<const float>(a.query, tile.batch, tile.row_begin + r / a.group, tile.kv_head * a.group + r % a.group);
}

// The number of the keys from `begin` on that row r of the tile may see.
static inline std::int64_t visible_keys(const Attention& a, const Tile& tile, std::int64_t r, std::int64_t begin,
                                        std::int64_t count) {
    if (!a.causal)
        return count;
    const std::int64_t limit = position(a.start, tile.batch) + tile.row_begin + r / a.group + 1 - begin;
    return smaller(larger(limit, 0), count);
}

static inline std::int64_t tile_rows(const Attention& a, const Tile& tile) {
    return a.group * (tile.row_end - tile.row_begin);
}

// Whether a row of the tile may be kept from a key that is read for another one.
static inline bool hides(const Attention& a, const Tile& tile) {
    return a.mask.data != nullptr || (a.causal && tile.row_end - tile.row_begin > 1);
}

// Merges the partials of all parts of the keys, in order, and writes the output rows. See AttentionKernels::finish.
template <class V>
static void finish(const Attention& a, const Tile& tile, const Partial& first, std::int64_t count, std::int64_t pitch) {
    const std::int64_t width = round_up(a.dim, 2 * V::kWidth);
    for (std::int64_t r = 0; r < tile_rows(a, tile); ++r) {
        float maximum = kHidden, sum = 0;
        for (std::int64_t part = 0; part < count; ++part)
            if (first.maximum[part * pitch + r] > maximum)
                maximum = first.maximum[part * pitch + r];
        float* values = first.values + r * width;
        bool begun = false;
        for (std::int64_t part = 0; part < count; ++part) {
            const float part_sum = first.sum[part * pitch + r];
            if (part_sum == 0) // saw nothing, and has no values
                continue;
            const float factor = V::exp(first.maximum[part * pitch + r] - maximum);
            const float* part_values = values + part * pitch;
            for (std::int64_t d = 0; d < width; d += V::kWidth) {
                const auto scaled = V::mul(V::load(part_values + d), V::set1(factor));
                V::store(values + d, begun ? V::add(V::load(values + d), scaled) : scaled);
            }
            sum += part_sum * factor;
            begun = true;
        }
        float* output =
            at<float>(a.output, tile.batch, tile.row_begin + r / a.group, tile.kv_head * a.group + r % a.group);
        const auto scale = V::set1(begun ? 1 / sum : 0.0f);
        std::int64_t d = 0;
        for (; d + V::kWidth <= a.dim; d += V::kWidth)
            V::store(output + d, begun ? V::mul(V::load(values + d), scale) : V::zero());
        if (d < a.dim)
            V::store(output + d, begun ? V::mul(V::load(values + d), scale) : V::zero(), a.dim - d);
    }
}

} // namespace gr::simd
