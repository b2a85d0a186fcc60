// Scores to weights, and the end of it. What happens to a score: softcap, then the mask, then the softmax.
//
// Softmax in parts: for scores s_j and a running maximum m, sum l = sum exp(s_j - m) and values a = sum exp(s_j - m)
// v_j, a part with maximum m' > m first scales l and a by exp(m - m'). The output is a / l. A row that has seen no key
// has m = minus infinity and l = 0. A NaN score makes l NaN, and with it the row. A sink is one more score, which has
// no value.
#pragma once

#include <limits>

#include "../float16.h"
#include "runs.h"

namespace gr::simd {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Within 1.5 ulp, below 0.625 within 0.72 (every float from 2^-13 to 16 tried; smaller ones stay what they are, and
// larger ones give 1). Small x: x + x^3 q(x^2), with q of degree 4 fitted for the least largest relative error on [0,
// 0.625], 4.4e-9. Others: with e = exp(-2 |x|), 1 - 2 e / (1 + e).
template <class V> static inline typename V::Floats tanh(typename V::Floats x) {
    const auto one = V::set1(1.0f), magnitude = V::abs(x), square = V::mul(x, x);
    auto q = V::set1(-0.005704985f);
    q = V::fma(q, square, V::set1(0.020639086f));
    q = V::fma(q, square, V::set1(-0.053739715f));
    q = V::fma(q, square, V::set1(0.13331442f));
    q = V::fma(q, square, V::set1(-0.3333328f));
    const auto small = V::fma(V::mul(q, square), x, x);
    const auto power = V::exp(V::mul(magnitude, V::set1(-2.0f)));
    const auto large = V::sub(one, V::div(V::add(power, power), V::add(one, power)));
    return V::where_less(magnitude, V::set1(0.625f), small, V::with_sign(large, x));
}

// softcap * tanh(score / softcap) for `count` scores and those up to the end of the last vector.
template <class V> static void cap(float softcap, std::int64_t count, float* scores) {
    const auto limit = V::set1(softcap);
    for (std::int64_t j = 0; j < count; j += V::kWidth)
        V::store(scores + j, V::mul(limit, tanh<V>(V::div(V::load(scores + j), limit))));
}

static inline float to_float(float value) {
    return value;
}
static inline float to_float(Half value) {
    return float16_to_float(value.bits);
}
static inline float to_float(BFloat value) {
    return bfloat16_to_float(value.bits);
}

template <class V, typename T>
static void add_mask(const T* mask, std::int64_t stride, std::int64_t count, float* scores) {
    std::int64_t j = 0;
    for (; stride == 1 && j + V::kWidth <= count; j += V::kWidth)
        V::store(scores + j,
                 V::add_bias(V::load(scores + j), V::values(mask + j, V::set1(std::int32_t{0})), V::set1(kHidden)));
    for (; j < count; ++j) {
        const float bias = to_float(mask[j * stride]);
        scores[j] = bias == kHidden ? kHidden : scores[j] + bias;
    }
}

template <class V> static void hide(const std::uint8_t* mask, std::int64_t stride, std::int64_t count, float* scores) {
    std::int64_t j = 0;
    for (; stride == 1 && j + V::kWidth <= count; j += V::kWidth)
        V::store(scores + j, V::where_byte(mask + j, V::load(scores + j), V::set1(kHidden)));
    for (; j < count; ++j)
        scores[j] = mask[j * stride] != 0 ? scores[j] : kHidden;
}

// Applies the mask of keys [begin, begin + count) to the scores of one row; hidden keys become kHidden whatever they
// were.
template <class V>
static void apply_mask(const Attention& a, const QueryRow& row, std::int64_t begin, std::int64_t count, float* scores) {
    const std::int64_t stride = a.mask.stride[3];
    const auto mask = [&](auto type) { return at<const decltype(type)>(a.mask, row.batch, row.row, row.head, begin); };
    switch (a.mask_element) {
    case Element::Bool:
        return hide<V>(mask(std::uint8_t()), stride, count, scores);
    case Element::Half:
        return add_mask<V>(mask(Half()), stride, count, scores);
    case Element::BFloat:
        return add_mask<V>(mask(BFloat()), stride, count, scores);
    default:
        return add_mask<V>(mask(float()), stride, count, scores);
    }
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

// Brings the values of row r of all partials, `pitch` floats apart, together in the first one, relative to the maximum
// of all. Returns the sum; 0 where no part has seen a key.
template <class V>
static float merge(const Partial& first, std::int64_t r, std::int64_t count, std::int64_t pitch, std::int64_t width,
                   float& maximum) {
    float sum = 0;
    maximum = kHidden;
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
    return sum;
}

static inline float sink_of(const Attention& a, std::int64_t head) {
    switch (a.exact) {
    case Element::Half:
        return to_float(*at<const Half>(a.sinks, 0, 0, head));
    case Element::BFloat:
        return to_float(*at<const BFloat>(a.sinks, 0, 0, head));
    default:
        return *at<const float>(a.sinks, 0, 0, head);
    }
}

// What makes the output of a row of the sum of its values; 0 if it has seen no key.
template <class V> static float output_factor(const Attention& a, std::int64_t head, float sum, float maximum) {
    if (sum == 0)
        return 0;
    if (a.sinks.data == nullptr || sink_of(a, head) == kHidden)
        return 1 / sum;
    const float sink = sink_of(a, head), highest = sink > maximum ? sink : maximum;
    const float factor = V::exp(maximum - highest);
    return factor / (sum * factor + V::exp(sink - highest));
}

// Merges the partials of all parts of the keys, in order, and writes the output rows. See AttentionKernels::finish.
template <class V, typename T>
static void finish_rows(const Attention& a, const Tile& tile, const Partial& first, std::int64_t count,
                        std::int64_t pitch) {
    const std::int64_t width = round_up(a.dim, 2 * V::kWidth);
    for (std::int64_t r = 0; r < tile_rows(a, tile); ++r) {
        const QueryRow row(a, tile, r);
        float maximum;
        const float sum = merge<V>(first, r, count, pitch, width, maximum);
        const auto factor = V::set1(output_factor<V>(a, row.head, sum, maximum));
        const float* values = first.values + r * width;
        T* output = at<T>(a.output, row.batch, row.row, row.head);
        for (std::int64_t d = 0; d < a.dim; d += V::kWidth) {
            const auto value = sum == 0 ? V::zero() : V::mul(V::load(values + d), factor);
            if (d + V::kWidth <= a.dim)
                V::store(output + d, value);
            else
                V::store(output + d, value, a.dim - d);
        }
    }
}

template <class V>
static void finish(const Attention& a, const Tile& tile, const Partial& first, std::int64_t count, std::int64_t pitch) {
    switch (a.exact) {
    case Element::Half:
        return finish_rows<V, Half>(a, tile, first, count, pitch);
    case Element::BFloat:
        return finish_rows<V, BFloat>(a, tile, first, count, pitch);
    default:
        return finish_rows<V, float>(a, tile, first, count, pitch);
    }
}

} // namespace gr::simd
