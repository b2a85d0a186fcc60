// Attention in double precision, one query row after the other: the oracle of every other path.
#include <cmath>
#include <limits>

#include "attend.h"
#include "float16.h"

namespace gr {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

std::int64_t offset(const Strided& operand, std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d = 0) {
    return b * operand.stride[0] + s * operand.stride[1] + h * operand.stride[2] + d * operand.stride[3];
}

// Calls body(element) with a function from the index of an element, which is not Int4, to its value.
template <typename Body> void with_elements(Element type, const void* data, const Body& body) {
    switch (type) {
    case Element::Half:
        return body([=](std::int64_t k) { return float16_to_float(static_cast<const std::uint16_t*>(data)[k]); });
    case Element::BFloat:
        return body([=](std::int64_t k) { return bfloat16_to_float(static_cast<const std::uint16_t*>(data)[k]); });
    case Element::Int8:
        return body([=](std::int64_t k) { return static_cast<float>(static_cast<const std::int8_t*>(data)[k]); });
    default:
        return body([=](std::int64_t k) { return static_cast<const float*>(data)[k]; });
    }
}

double element(Element type, const void* data, std::int64_t index) {
    double value = 0;
    with_elements(type, data, [&](auto at) { value = at(index); });
    return value;
}

// One row of any type, without scales and zero points.
void read_elements(const Attention& a, Element type, const Strided& rows, std::int64_t b, std::int64_t s,
                   std::int64_t h, double* out) {
    const std::int64_t first = offset(rows, b, s, h), stride = rows.stride[3];
    if (type == Element::Int4) {
        const auto* bytes = static_cast<const std::uint8_t*>(rows.data) + first;
        for (std::int64_t d = 0; d < a.dim; ++d)
            out[d] = bytes[d / 2 * stride] >> d % 2 * 4 & 15;
        return;
    }
    with_elements(type, rows.data, [&](auto at) {
        for (std::int64_t d = 0; d < a.dim; ++d)
            out[d] = at(first + d * stride);
    });
}

// Row j of keys or values, wherever it lies.
void read_row(const Attention& a, const CachedRows& rows, std::int64_t b, std::int64_t j, std::int64_t h, double* out) {
    const std::int64_t recent = j - position(a.start, b);
    if (rows.recent.data != nullptr && recent >= 0 && recent < a.rows)
        return read_elements(a, a.exact, rows.recent, b, recent, h, out);
    read_elements(a, rows.element, rows.cache, b, j, h, out);
    if (!is_quantized(rows.element))
        return;
    const bool is_int4 = rows.element == Element::Int4;
    const Strided &scales = rows.scales.data, &zero_points = rows.zero_points.data;
    float scale = 0, zero_point = is_int4 ? 8 : 0;
    for (std::int64_t d = 0, scale_end = 0, point_end = 0; d < a.dim; ++d) {
        if (d == scale_end) {
            scale = *at<const float>(scales, b, j, h, d / rows.scales.group);
            scale_end += rows.scales.group;
        }
        if (zero_points.data != nullptr && d == point_end) {
            const std::uint8_t point = *at<const std::uint8_t>(zero_points, b, j, h, d / rows.zero_points.group);
            zero_point = is_int4 ? point : static_cast<std::int8_t>(point);
            point_end += rows.zero_points.group;
        }
        out[d] = (static_cast<float>(out[d]) - zero_point) * scale;
    }
}

void read_query(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, double* out) {
    read_elements(a, a.query_element, a.query, b, i, h, out);
    if (a.query_element != Element::Int8)
        return;
    const bool has_zero_point = a.query_zero_points.data != nullptr;
    const float zero_point = has_zero_point ? *at<const std::int8_t>(a.query_zero_points, b, i, h) : 0;
    for (std::int64_t d = 0; d < a.dim; ++d)
        out[d] = (static_cast<float>(out[d]) - zero_point) * *at<const float>(a.query_scales, b, i, h);
}

// What the mask adds to a score; minus infinity where it hides the key.
double mask_bias(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j) {
    if (a.mask.data == nullptr)
        return 0;
    if (a.mask_element == Element::Bool)
        return *at<const std::uint8_t>(a.mask, b, i, h, j) != 0 ? 0 : kHidden;
    return element(a.mask_element, a.mask.data, offset(a.mask, b, i, h, j));
}

// What a worker keeps.
struct Memory {
    double* query; // [D]
    double* row;   // [D]
    double* sums;  // [D]
    double* scores;
};

// Scores of the first `keys` keys for a row; minus infinity for those it does not see.
void score_row(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t keys,
               const Memory& memory) {
    read_query(a, b, i, h, memory.query);
    const std::int64_t begin = window_begin(a, b, i);
    for (std::int64_t j = 0; j < keys; ++j) {
        const double bias = j < begin && j >= a.sink_tokens ? kHidden : mask_bias(a, b, i, h, j);
        memory.scores[j] = kHidden;
        if (bias == kHidden)
            continue;
        read_row(a, a.key, b, j, h / a.group, memory.row);
        double dot = 0;
        for (std::int64_t d = 0; d < a.dim; ++d)
            dot += memory.query[d] * memory.row[d];
        dot *= a.scale;
        memory.scores[j] = (a.softcap > 0 ? a.softcap * std::tanh(dot / a.softcap) : dot) + bias;
    }
}

void store_output(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d, double value) {
    const std::int64_t place = offset(a.output, b, i, h, d);
    const float rounded = static_cast<float>(value);
    if (a.exact == Element::Float)
        static_cast<float*>(a.output.data)[place] = rounded;
    else
        static_cast<std::uint16_t*>(a.output.data)[place] =
            a.exact == Element::Half ? float_to_float16(rounded) : float_to_bfloat16(rounded);
}

void attend_row(const Attention& a, std::int64_t b, std::int64_t i, std::int64_t h, const Memory& memory) {
    const std::int64_t keys = key_limit(a, b, i + 1);
    score_row(a, b, i, h, keys, memory);
    double maximum = kHidden, total = 0;
    for (std::int64_t j = 0; j < keys; ++j)
        if (!(memory.scores[j] <= maximum) && !std::isnan(maximum)) // so NaN becomes the maximum, and the row NaN
            maximum = memory.scores[j];
    const bool sees_any = maximum != kHidden;
    const double sink = a.sinks.data != nullptr ? element(a.exact, a.sinks.data, offset(a.sinks, 0, 0, h)) : kHidden;
    if (sink > maximum)
        maximum = sink;
    for (std::int64_t d = 0; d < a.dim; ++d)
        memory.sums[d] = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
        if (memory.scores[j] == kHidden)
            continue;
        const double weight = std::exp(memory.scores[j] - maximum);
        total += weight;
        read_row(a, a.value, b, j, h / a.group, memory.row);
        for (std::int64_t d = 0; d < a.dim; ++d)
            memory.sums[d] += weight * memory.row[d];
    }
    if (sink != kHidden)
        total += std::exp(sink - maximum);
    for (std::int64_t d = 0; d < a.dim; ++d)
        store_output(a, b, i, h, d, sees_any ? memory.sums[d] / total : 0);
}

} // namespace

std::int64_t reference_scratch(const Attention& a) {
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < a.batch; ++b)
        longest = larger(longest, key_limit(a, b, a.rows));
    return round_up(3 * a.dim + longest, 8);
}

void attend_reference(const Attention& a, const Threads& threads, double* scratch) {
    const std::int64_t jobs = a.batch * a.query_heads * a.rows, pitch = reference_scratch(a);
    threads.run(static_cast<std::size_t>(jobs), [&](std::size_t index, std::size_t worker) {
        const std::int64_t job = static_cast<std::int64_t>(index), rest = job / a.rows;
        double* memory = scratch + static_cast<std::int64_t>(worker) * pitch;
        attend_row(a, rest / a.query_heads, job % a.rows, rest % a.query_heads,
                   {memory, memory + a.dim, memory + 2 * a.dim, memory + 3 * a.dim});
    });
}

} // namespace gr
