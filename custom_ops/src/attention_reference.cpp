// Attention in double precision, one query row after the other: the oracle of every other path.
#include <cmath>
#include <limits>

#include "attention.h"
#include "scratch.h"
#include "threads.h"

namespace gr {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// One row of keys or values for a query row, whatever holds it.
class Row {
public:
    Row(const Attention& a, const CachedRows& rows, std::int64_t b, std::int64_t j, std::int64_t h) {
        const std::int64_t recent = j - position(a.start, b);
        if (rows.recent.data != nullptr && recent >= 0 && recent < a.rows) {
            floats_ = at<const float>(rows.recent, b, recent, h);
            stride_ = rows.recent.stride[3];
            return;
        }
        stride_ = rows.cache.stride[3];
        if (!rows.quantized) {
            floats_ = at<const float>(rows.cache, b, j, h);
            return;
        }
        codes_ = at<const std::int8_t>(rows.cache, b, j, h);
        scale_ = *at<const float>(rows.scales, b, j, h);
        if (rows.zero_points.data != nullptr)
            zero_point_ = *at<const std::int8_t>(rows.zero_points, b, j, h);
    }

    double operator[](std::int64_t d) const {
        if (floats_ != nullptr)
            return floats_[d * stride_];
        return static_cast<float>(codes_[d * stride_] - zero_point_) * scale_;
    }

private:
    const float* floats_ = nullptr;
    const std::int8_t* codes_ = nullptr;
    std::int64_t stride_ = 0;
    float scale_ = 1;
    std::int32_t zero_point_ = 0;
};

// What the mask adds to a score; minus infinity where it hides the key.
double mask_bias(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j) {
    if (a.mask.data == nullptr)
        return 0;
    if (a.mask_is_bool)
        return *at<const std::uint8_t>(a.mask, b, i, h, j) != 0 ? 0 : kHidden;
    return *at<const float>(a.mask, b, i, h, j);
}

void attend_row(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, double* scores, double* sums) {
    const float* query = at<const float>(a.query, b, i, h);
    const std::int64_t keys = key_limit(a, b, i + 1), kv_head = h / a.group;
    double maximum = kHidden;
    for (std::int64_t j = 0; j < keys; ++j) {
        const double bias = mask_bias(a, b, i, h, j);
        scores[j] = kHidden;
        if (bias == kHidden)
            continue;
        const Row key(a, a.key, b, j, kv_head);
        double dot = 0;
        for (std::int64_t d = 0; d < a.dim; ++d)
            dot += static_cast<double>(query[d * a.query.stride[3]]) * key[d];
        scores[j] = dot * a.scale + bias;
        if (!(scores[j] <= maximum)) // so NaN, too, becomes the maximum, and the row NaN
            maximum = scores[j];
    }
    for (std::int64_t d = 0; d < a.dim; ++d)
        sums[d] = 0;
    double total = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
        if (scores[j] == kHidden)
            continue;
        const double weight = std::exp(scores[j] - maximum);
        const Row value(a, a.value, b, j, kv_head);
        total += weight;
        for (std::int64_t d = 0; d < a.dim; ++d)
            sums[d] += weight * value[d];
    }
    float* output = at<float>(a.output, b, i, h);
    for (std::int64_t d = 0; d < a.dim; ++d)
        output[d * a.output.stride[3]] = total == 0 ? 0.0f : static_cast<float>(sums[d] / total);
}

} // namespace

void attend_reference(const Attention& a, const Threads& threads) {
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < a.batch; ++b)
        longest = larger(longest, key_limit(a, b, a.rows));
    const std::int64_t jobs = a.batch * a.query_heads * a.rows, pitch = round_up(longest + a.dim, 8);
    const Scratch scratch(threads.workers() * static_cast<std::size_t>(pitch) * sizeof(double));
    threads.run(static_cast<std::size_t>(jobs), [&](std::size_t index, std::size_t worker) {
        const std::int64_t job = static_cast<std::int64_t>(index), rest = job / a.rows;
        double* scores = static_cast<double*>(scratch.data()) + static_cast<std::int64_t>(worker) * pitch;
        attend_row(a, rest / a.query_heads, job % a.rows, rest % a.query_heads, scores, scores + longest);
    });
}

} // namespace gr
