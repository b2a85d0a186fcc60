// Turns rows into floats, for what cannot be used as it lies: codes whose scale changes along the row, or that are
// smaller than a byte. A few rows at a time, so that the floats stay in the first-level cache until they are used.
#pragma once

#include "runs.h"

namespace gr::simd {

constexpr std::int64_t kUnpackRows = 16;

// Int8 codes that share scale and zero point.
template <class V> class ByteGroup {
public:
    ByteGroup(std::int32_t zero_point, float scale) : zero_point_(V::set1(zero_point)), scale_(V::set1(scale)) {}
    typename V::Floats operator()(const std::int8_t* p) const { return V::mul(V::values(p, zero_point_), scale_); }
    typename V::Floats operator()(const std::int8_t* p, std::int64_t n) const {
        return V::mul(V::values(p, zero_point_, n), scale_);
    }

private:
    typename V::Ints zero_point_;
    typename V::Floats scale_;
};

template <class V> class Unpacker {
public:
    static std::int64_t scratch(std::int64_t dim) { return (kUnpackRows + 2) * round_up(dim, V::kWidth); }

    Unpacker(std::int64_t dim, float* memory)
        : dim_(dim), pitch_(round_up(dim, V::kWidth)), rows_(memory), scales_(memory + kUnpackRows * pitch_),
          zero_points_(scales_ + pitch_) {}

    // From one row to the next, in floats; behind the elements of a row there are zeros up to it.
    std::int64_t pitch() const { return pitch_; }

    // Rows [j, j + count) of a head of the run, count <= kUnpackRows. They stay until the next call.
    const float* operator()(const Run& run, std::int64_t head, std::int64_t j, std::int64_t count) const {
        with_access(run, [&](auto type) {
            using T = decltype(type);
            for (std::int64_t k = 0; k < count; ++k) {
                float* const out = rows_ + k * pitch_;
                if constexpr (std::is_same_v<T, Codes>)
                    unpack(run, head, j + k, k == 0, out);
                else
                    convert(row_at<T>(run, j + k, head), out);
            }
        });
        return rows_;
    }

private:
    template <typename T> void convert(const T* row, float* out) const {
        const auto none = V::set1(std::int32_t{0});
        for (std::int64_t d = 0; d < pitch_; d += V::kWidth)
            V::store(out + d, d + V::kWidth <= dim_ ? V::values(row + d, none) : V::values(row + d, none, dim_ - d));
    }

    // `is_first`: of the rows of one call.
    void unpack(const Run& run, std::int64_t head, std::int64_t j, bool is_first, float* out) const {
        const bool is_int4 = run.element == Element::Int4;
        const std::int64_t group = run.scales.group;
        const bool shared = run.zero_points.data == nullptr || run.zero_points.group == group;
        // The last vector of a row may read and write no further than the row.
        if (!shared || 2 * group < V::kWidth || (is_int4 && group % 2 != 0)) {
            spread(run, head, j, is_first);
            is_int4 ? unpack_spread(row_at<Int4Pair>(run, j, head), out)
                    : unpack_spread(row_at<std::int8_t>(run, j, head), out);
        } else if (is_int4) {
            unpack_groups<typename V::PairGroup>(run, head, j, row_at<Int4Pair>(run, j, head), 2, out);
        } else {
            unpack_groups<ByteGroup<V>>(run, head, j, row_at<std::int8_t>(run, j, head), 1, out);
        }
        for (std::int64_t d = dim_; d < pitch_; ++d)
            out[d] = 0;
    }

    // `codes`: how many an element of the row holds.
    template <class Group, typename T>
    void unpack_groups(const Run& run, std::int64_t head, std::int64_t j, const T* row, std::int64_t codes,
                       float* out) const {
        const RunParameters<float>& scales = run.scales;
        std::int64_t scale = j * scales.stride + head * scales.head_stride;
        std::int64_t zero_point = j * run.zero_points.stride + head * run.zero_points.head_stride;
        for (std::int64_t end, d = 0; d < dim_; d = end) {
            end = d + scales.group;
            const Group group(run.zero_point(zero_point), scales.data[scale]);
            for (; d + V::kWidth <= end; d += V::kWidth)
                V::store(out + d, group(row + d / codes));
            if (d < end)
                V::store(out + d, group(row + d / codes, end - d), end - d);
            scale += scales.step;
            zero_point += run.zero_points.step;
        }
    }

    // Gives each element of row j its own scale and zero point.
    void spread(const Run& run, std::int64_t head, std::int64_t j, bool is_first) const {
        const RunParameters<float>& scales = run.scales;
        const RunParameters<std::uint8_t>& points = run.zero_points;
        if (is_first || scales.stride != 0)
            fill(scales.group, scales_, [&](std::int64_t n) {
                return scales.data[j * scales.stride + head * scales.head_stride + n * scales.step];
            });
        if (is_first || points.stride != 0)
            fill(points.data != nullptr ? points.group : dim_, zero_points_, [&](std::int64_t n) {
                return static_cast<float>(
                    run.zero_point(j * points.stride + head * points.head_stride + n * points.step));
            });
    }

    template <typename Value> void fill(std::int64_t group, float* out, const Value& value) const {
        for (std::int64_t n = 0; n < dim_ / group; ++n) {
            const float one = value(n);
            for (std::int64_t d = n * group; d < (n + 1) * group; ++d)
                out[d] = one;
        }
    }

    static auto codes(const std::int8_t* row, std::int64_t d) { return V::values(row + d, V::set1(std::int32_t{0})); }
    static auto codes(const std::int8_t* row, std::int64_t d, std::int64_t n) {
        return V::values(row + d, V::set1(std::int32_t{0}), n);
    }
    static auto codes(const Int4Pair* row, std::int64_t d) { return V::codes(row + d / 2); }
    static auto codes(const Int4Pair* row, std::int64_t d, std::int64_t n) { return V::codes(row + d / 2, n); }

    template <typename T> void unpack_spread(const T* row, float* out) const {
        for (std::int64_t d = 0; d < dim_; d += V::kWidth) {
            const auto code = d + V::kWidth <= dim_ ? codes(row, d) : codes(row, d, dim_ - d);
            V::store(out + d, V::mul(V::sub(code, V::load(zero_points_ + d)), V::load(scales_ + d)));
        }
    }

    const std::int64_t dim_, pitch_;
    float* rows_;        // [kUnpackRows, pitch]
    float* scales_;      // [pitch], of one row, where a group is too small for a vector
    float* zero_points_; // [pitch]
};

} // namespace gr::simd
