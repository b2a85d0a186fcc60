// UpdateQuantizedCache: quantizes new rows and writes codes, scales and zero points in one pass.
#include <cstring>
#include <optional>

#include "error.h"
#include "isa.h"
#include "scratch.h"
#include "update.h"

namespace gr {
namespace {

constexpr const char* kOp = "UpdateQuantizedCache";
constexpr std::int64_t kJobElements = 16384; // elements a job quantizes, a few microseconds' worth

// One of codes, scales and zero points: the input and the output that replaces it.
struct Pair {
    View before, after;

    Pair(const char* before_name, const GrTensor* input, const char* after_name, const GrTensor* output, Layout layout,
         std::int32_t dtype)
        : before(kOp, before_name, input, layout), after(kOp, after_name, output, layout) {
        before.require_dtype({dtype});
    }

    // `like`: the codes; one element stands for each of their rows.
    void check_per_row(const View& like) const {
        before.require_shape(like.size(kBatch), like.size(kSequence), like.size(kHead), 1,
                             "like codes with one element a row");
    }
};

// Quantizes rows of `dim` floats to codes, one scale and, where zero_points.data is not NULL, one zero point.
struct RowQuantizer {
    Strided value, codes, scales, zero_points;
    Positions start;
    std::int64_t batch, rows, heads, dim;
    QuantizeRow quantize;

    // `row` and `packed` are scratch for a row whose elements do not lie side by side.
    void run_row(std::int64_t b, std::int64_t s, std::int64_t h, float* row, std::int8_t* packed) const {
        const float* source = at<const float>(value, b, s, h);
        if (value.stride[3] != 1) {
            for (std::int64_t d = 0; d < dim; ++d)
                row[d] = source[d * value.stride[3]];
            source = row;
        }
        const std::int64_t slot = position(start, b) + s;
        std::int8_t* target = at<std::int8_t>(codes, b, slot, h);
        std::int8_t zero_point = 0;
        const bool dense = codes.stride[3] == 1;
        quantize(source, dim, dense ? target : packed, at<float>(scales, b, slot, h), &zero_point);
        for (std::int64_t d = 0; !dense && d < dim; ++d)
            target[d * codes.stride[3]] = packed[d];
        if (zero_points.data != nullptr)
            *at<std::int8_t>(zero_points, b, slot, h) = zero_point;
    }

    std::int64_t scratch_bytes() const { return round_up(dim * 5, 64); } // a row of floats and one of codes

    void run(const Threads& threads, char* scratch) const {
        const std::int64_t total = batch * rows * heads, group = larger(1, kJobElements / larger(1, dim));
        threads.run(static_cast<std::size_t>(divide_up(total, group)), [&](std::size_t index, std::size_t worker) {
            auto* row = reinterpret_cast<float*>(scratch + static_cast<std::int64_t>(worker) * scratch_bytes());
            auto* packed = reinterpret_cast<std::int8_t*>(row + dim);
            const std::int64_t begin = static_cast<std::int64_t>(index) * group, end = smaller(begin + group, total);
            for (std::int64_t n = begin; n < end; ++n)
                run_row(n / heads / rows, n / heads % rows, n % heads, row, packed);
        });
    }
};

// No output may share memory with an input, save its own, or with another output.
void check_apart(const Pair* const* pairs, int count, const View& value, const Argument& start_pos) {
    for (int k = 0; k < count; ++k) {
        check_pair(pairs[k]->before, pairs[k]->after);
        require_disjoint(pairs[k]->after, value, false);
        require_disjoint(pairs[k]->after, start_pos, false);
        for (int other = 0; other < count; ++other)
            if (other != k) {
                require_disjoint(pairs[k]->after, pairs[other]->before, false);
                require_disjoint(pairs[k]->after, pairs[other]->after, false);
            }
    }
}

} // namespace

bool is_symmetric(const char* op, const char* scheme) {
    if (scheme == nullptr || std::strcmp(scheme, "asymmetric") == 0)
        return false;
    if (std::strcmp(scheme, "symmetric") == 0)
        return true;
    fail(op, "scheme \"", scheme, "\" is unknown, expected \"asymmetric\" or \"symmetric\"");
}

void update_quantized_cache(const GrTensor* value, const GrTensor* codes, const GrTensor* scales,
                            const GrTensor* start_pos, const GrTensor* zero_points, const GrTensor* new_codes,
                            const GrTensor* new_scales, const GrTensor* new_zero_points, const char* scheme,
                            const char* layout_text, const Threads& threads) {
    const Layout layout = parse_layout(kOp, layout_text);
    const bool symmetric = is_symmetric(kOp, scheme);
    if (!symmetric && zero_points == nullptr)
        fail(kOp, "zero_points is missing, and the scheme \"asymmetric\" needs it");
    if ((zero_points == nullptr) != (new_zero_points == nullptr))
        fail(kOp, zero_points == nullptr ? "new_zero_points is an output but zero_points is missing"
                                         : "zero_points is given but new_zero_points is not an output");
    const View rows(kOp, "value", value, layout);
    rows.require_dtype({GR_FLOAT});
    const Pair code_pair("codes", codes, "new_codes", new_codes, layout, GR_INT8);
    const Pair scale_pair("scales", scales, "new_scales", new_scales, layout, GR_FLOAT);
    std::optional<Pair> zero_point_pair;
    if (zero_points != nullptr)
        zero_point_pair.emplace("zero_points", zero_points, "new_zero_points", new_zero_points, layout, GR_INT8);

    const View& cache = code_pair.before;
    rows.require_shape(cache.size(kBatch), rows.size(kSequence), cache.size(kHead), cache.size(kDim), "like codes");
    if (cache.size(kDim) == 0)
        fail(kOp, "codes has shape ", shape_text(*codes), ", and rows without elements have no scale");
    scale_pair.check_per_row(cache);
    if (zero_point_pair)
        zero_point_pair->check_per_row(cache);
    const Positions start =
        check_positions(kOp, start_pos, cache.size(kBatch), rows.size(kSequence), cache.size(kSequence));
    const Pair* pairs[] = {&code_pair, &scale_pair, zero_point_pair ? &*zero_point_pair : nullptr};
    const int count = zero_point_pair ? 3 : 2;
    check_apart(pairs, count, rows, Argument(kOp, "start_pos", start_pos));

    const Kernels& kernels = active_kernels(kOp);
    const RowQuantizer quantizer{rows.strided(),
                                 code_pair.after.strided(),
                                 scale_pair.after.strided(),
                                 zero_point_pair ? zero_point_pair->after.strided() : Strided{},
                                 start,
                                 cache.size(kBatch),
                                 rows.size(kSequence),
                                 cache.size(kHead),
                                 cache.size(kDim),
                                 symmetric ? kernels.quantize_symmetric : kernels.quantize_asymmetric};
    const Scratch scratch(threads.workers() * static_cast<std::size_t>(quantizer.scratch_bytes()));
    for (int k = 0; k < count; ++k)
        copy_cache(pairs[k]->before, pairs[k]->after, threads);
    quantizer.run(threads, static_cast<char*>(scratch.data()));
}

} // namespace gr
