// Where the rows of keys and values, and those of the query, lie.
#pragma once

#include <type_traits>

#include "../attention.h"

namespace gr::simd {

// Scales or zero points of the rows of a run. Strides are in elements: from one row to the next, from one head to the
// next, and from those of one group of elements to those of the next.
template <typename T> struct RunParameters {
    const T* data; // of the first row; NULL: absent
    std::int64_t stride, head_stride, step, group;
};

// How a kernel takes rows in: each type of element has its own way, save for `Codes`, which are unpacked to floats
// first because their scales change along a row, or they are smaller than a byte.
struct Codes {};
enum class Access { Float, Half, BFloat, Int8, Codes };

// Keys or values of consecutive positions that lie in one place.
struct Run {
    std::int64_t begin, end; // positions
    const void* rows;        // of the first
    std::int64_t stride;     // elements, or bytes of Int4, from one row to the next
    std::int64_t head_stride;
    Element element;
    Access access;
    RunParameters<float> scales;
    RunParameters<std::uint8_t> zero_points; // whatever their type

    std::int64_t count() const { return end - begin; }

    // Of rows [j, j + count), where there is one for each: the scales, 1 for floats.
    void copy_scales(std::int64_t j, std::int64_t count, float* out) const {
        if (access != Access::Int8) {
            for (std::int64_t k = 0; k < count; ++k)
                out[k] = 1;
            return;
        }
        const float* source = scales.data + j * scales.stride;
        for (std::int64_t k = 0; k < count; ++k)
            out[k] = source[k * scales.stride];
    }
    // And for Access::Int8 the zero points of a head.
    void copy_zero_points(std::int64_t head, std::int64_t j, std::int64_t count, std::int32_t* out) const {
        const auto* source = reinterpret_cast<const std::int8_t*>(zero_points.data);
        if (source != nullptr)
            source += j * zero_points.stride + head * zero_points.head_stride;
        for (std::int64_t k = 0; k < count; ++k)
            out[k] = source != nullptr ? source[k * zero_points.stride] : 0;
    }

    std::int32_t zero_point(std::int64_t place) const {
        if (zero_points.data == nullptr)
            return element == Element::Int4 ? 8 : 0;
        const std::uint8_t byte = zero_points.data[place];
        return element == Element::Int8 ? static_cast<std::int8_t>(byte) : byte;
    }
};

static inline std::int64_t element_bytes(Element element) {
    return element == Element::Float ? 4 : element == Element::Half || element == Element::BFloat ? 2 : 1;
}

static inline const void* address(const Strided& operand, std::int64_t item, std::int64_t b, std::int64_t s,
                                  std::int64_t h) {
    return static_cast<const char*>(operand.data) +
           (b * operand.stride[0] + s * operand.stride[1] + h * operand.stride[2]) * item;
}

template <typename T>
static inline RunParameters<T> run_parameters(const Parameters& parameters, std::int64_t b, std::int64_t s,
                                              std::int64_t h) {
    if (parameters.data.data == nullptr)
        return {nullptr, 0, 0, 0, 0};
    const std::int64_t* stride = parameters.data.stride;
    return {at<const T>(parameters.data, b, s, h), stride[1], stride[2], stride[3], parameters.group};
}

static inline Run float_run(const Strided& rows, Element element, std::int64_t b, std::int64_t s, std::int64_t h,
                            std::int64_t begin, std::int64_t end) {
    const Access access = element == Element::Float  ? Access::Float
                          : element == Element::Half ? Access::Half
                                                     : Access::BFloat;
    const void* first = address(rows, element_bytes(element), b, s, h);
    return {begin, end, first, rows.stride[1], rows.stride[2], element, access, {}, {}};
}

static inline Run cache_run(const Attention& a, const CachedRows& rows, std::int64_t b, std::int64_t h,
                            std::int64_t begin, std::int64_t end) {
    if (!is_quantized(rows.element))
        return float_run(rows.cache, rows.element, b, begin, h, begin, end);
    const bool per_row =
        rows.scales.group == a.dim && (rows.zero_points.data.data == nullptr || rows.zero_points.group == a.dim);
    return {begin,
            end,
            address(rows.cache, 1, b, begin, h),
            rows.cache.stride[1],
            rows.cache.stride[2],
            rows.element,
            rows.element == Element::Int8 && per_row ? Access::Int8 : Access::Codes,
            run_parameters<float>(rows.scales, b, begin, h),
            run_parameters<std::uint8_t>(rows.zero_points, b, begin, h)};
}

// Positions [begin, end) as at most three runs: the cache before the recent rows, those, and the cache behind them.
static inline int split(const Attention& a, const CachedRows& rows, std::int64_t b, std::int64_t h, std::int64_t begin,
                        std::int64_t end, Run (&runs)[3]) {
    int count = 0;
    const bool has_recent = rows.recent.data != nullptr;
    const std::int64_t start = has_recent ? position(a.start, b) : end, stop = has_recent ? start + a.rows : end;
    if (begin < smaller(end, start))
        runs[count++] = cache_run(a, rows, b, h, begin, smaller(end, start));
    const std::int64_t from = larger(begin, start), to = smaller(end, stop);
    if (from < to)
        runs[count++] = float_run(rows.recent, a.exact, b, from - start, h, from, to);
    if (larger(begin, stop) < end)
        runs[count++] = cache_run(a, rows, b, h, larger(begin, stop), end);
    return count;
}

// Calls body(T()) with the type of the elements, or Codes.
template <typename Body> static inline void with_access(const Run& run, const Body& body) {
    switch (run.access) {
    case Access::Float:
        return body(float());
    case Access::Half:
        return body(Half());
    case Access::BFloat:
        return body(BFloat());
    case Access::Int8:
        return body(std::int8_t());
    case Access::Codes:
        return body(Codes());
    }
}

template <typename T> static inline const T* row_at(const Run& run, std::int64_t j, std::int64_t head = 0) {
    return static_cast<const T*>(run.rows) + j * run.stride + head * run.head_stride;
}

// Row r of a tile is row r / group of its query rows, and head r % group of the first group of heads.
struct QueryRow {
    QueryRow(const Attention& a, const Tile& tile, std::int64_t r)
        : batch(tile.batch), row(tile.row_begin + r / a.group), head(tile.kv_head * a.group + r % a.group) {}
    std::int64_t batch, row, head;
};

template <class V, typename T>
static inline void scale_row(const T* row, std::int32_t zero_point, float own_scale, float scale, std::int64_t dim,
                             float* out) {
    for (std::int64_t d = 0; d < dim; d += V::kWidth) {
        const auto point = V::set1(zero_point);
        const auto value = d + V::kWidth <= dim ? V::values(row + d, point) : V::values(row + d, point, dim - d);
        V::store(out + d, V::mul(V::mul(value, V::set1(own_scale)), V::set1(scale)));
    }
    // Codes that are not there would count as minus the zero point.
    for (std::int64_t d = dim; d < round_up(dim, V::kWidth); ++d)
        out[d] = 0;
}

// A query row times the scale, padded with zeros to whole vectors.
template <class V> static void load_query(const Attention& a, const Tile& tile, std::int64_t r, float* out) {
    const QueryRow place(a, tile, r);
    const auto of = [&](const Strided& operand, auto type) {
        return at<const decltype(type)>(operand, place.batch, place.row, place.head);
    };
    switch (a.query_element) {
    case Element::Half:
        return scale_row<V>(of(a.query, Half()), 0, 1, a.scale, a.dim, out);
    case Element::BFloat:
        return scale_row<V>(of(a.query, BFloat()), 0, 1, a.scale, a.dim, out);
    case Element::Int8: {
        const bool has_zero_point = a.query_zero_points.data != nullptr;
        const std::int32_t zero_point = has_zero_point ? *of(a.query_zero_points, std::int8_t()) : 0;
        const float own_scale = *of(a.query_scales, float());
        return scale_row<V>(of(a.query, std::int8_t()), zero_point, own_scale, a.scale, a.dim, out);
    }
    default:
        return scale_row<V>(of(a.query, float()), 0, 1, a.scale, a.dim, out);
    }
}

static inline std::int64_t tile_rows(const Attention& a, const Tile& tile) {
    return a.group * (tile.row_end - tile.row_begin);
}

// The number of the keys from `begin` on that row r of the tile may see, leaving its window aside.
static inline std::int64_t visible_keys(const Attention& a, const Tile& tile, std::int64_t r, std::int64_t begin,
                                        std::int64_t count) {
    if (!a.causal)
        return count;
    const std::int64_t limit = position(a.start, tile.batch) + tile.row_begin + r / a.group + 1 - begin;
    return smaller(larger(limit, 0), count);
}

// How many of the keys from `begin` on lie before the window of row r of the tile.
static inline std::int64_t keys_before_window(const Attention& a, const Tile& tile, std::int64_t r, std::int64_t begin,
                                              std::int64_t count) {
    if (a.window == 0 || begin < a.sink_tokens)
        return 0;
    const std::int64_t first = window_begin(a, tile.batch, tile.row_begin + r / a.group) - begin;
    return smaller(larger(first, 0), count);
}

// Whether a row of the tile may be kept from a key that is read for another one.
static inline bool hides(const Attention& a, const Tile& tile) {
    return a.mask.data != nullptr || ((a.causal || a.window > 0) && tile.row_end - tile.row_begin > 1);
}

} // namespace gr::simd
