#include "choose_parameters.h"

#include "dense.h"
#include "error.h"
#include "float16.h"
#include "isa.h"
#include "widen.h"

namespace gr {
namespace {

constexpr std::int64_t kJobElements = 32768;
constexpr std::int64_t kBlock = 1024; // elements that are widened at once

float step_float16(float value) {
    return float16_to_float(float_to_float16(value));
}

float step_bfloat16(float value) {
    return bfloat16_to_float(float_to_bfloat16(value));
}

// torch rounds each step to the type of the input, but computes the symmetric scales of float16 in float32.
Step step_for(std::int32_t dtype, bool symmetric) {
    if (dtype == GR_BFLOAT16)
        return step_bfloat16;
    return dtype == GR_FLOAT16 && !symmetric ? step_float16 : keep_float;
}

Extremes extremes_of(const QuantizationKernels& kernels, const char* row, std::int32_t dtype, std::int64_t dim) {
    if (dtype == GR_FLOAT)
        return kernels.extremes(reinterpret_cast<const float*>(row), dim);
    float block[kBlock];
    Extremes all{0, 0};
    for (std::int64_t begin = 0; begin < dim; begin += kBlock) {
        const std::int64_t count = smaller(kBlock, dim - begin);
        widen(row + begin * dtype_bytes(dtype), dtype, 1, count, block);
        const Extremes some = kernels.extremes(block, count);
        if (some.lowest != some.lowest)
            return some;
        all = {some.lowest < all.lowest ? some.lowest : all.lowest,
               some.highest > all.highest ? some.highest : all.highest};
    }
    return all;
}

// Throws unless `output` has one element for each row of `input`.
void check_output(const Argument& output, const Argument& input, std::int32_t dtype) {
    output.require_dtype({dtype});
    const GrTensor &rows = input.tensor(), &tensor = output.tensor();
    bool fits = tensor.rank == rows.rank;
    for (std::int32_t d = 0; fits && d < rows.rank; ++d)
        fits = tensor.shape[d] == (d + 1 == rows.rank ? 1 : rows.shape[d]);
    if (!fits)
        fail(output.op(), output.name(), " has shape ", shape_text(tensor), ", expected one element for each row of ",
             input.name(), ", which has shape ", shape_text(rows));
    require_writable(output);
    require_disjoint(output, input, false);
}

} // namespace

void choose_parameters_per_token(const char* op, const GrTensor* input_tensor, const GrTensor* scales_tensor,
                                 const GrTensor* zero_points_tensor, bool symmetric, const Threads& threads) {
    const Argument input(op, "input", input_tensor), scales(op, "scales", scales_tensor);
    const Argument zero_points(op, "zero_points", zero_points_tensor);
    input.require_dtype({GR_FLOAT, GR_FLOAT16, GR_BFLOAT16});
    if (input_tensor->rank == 0)
        fail(op, "input has shape [], expected rank 1 or more");
    check_output(scales, input, GR_DOUBLE);
    check_output(zero_points, input, GR_INT64);
    require_disjoint(scales, zero_points, false);
    if (scales.empty())
        return;
    if (input.empty())
        fail(op, "input has shape ", shape_text(*input_tensor), ", and rows without elements have no scale");

    const QuantizationKernels& kernels = *active_kernels(op).quantization;
    const Dense rows(input), all_scales(scales), all_zero_points(zero_points);
    rows.load(threads);
    const std::int32_t dtype = input.dtype();
    const Step step = step_for(dtype, symmetric);
    const std::int64_t dim = input_tensor->shape[input_tensor->rank - 1], group = larger(1, kJobElements / dim);
    std::int64_t count = 1;
    for (std::int32_t d = 0; d + 1 < input_tensor->rank; ++d)
        count *= input_tensor->shape[d];
    threads.run(static_cast<std::size_t>(divide_up(count, group)), [&](std::size_t index, std::size_t) {
        const std::int64_t begin = static_cast<std::int64_t>(index) * group, end = smaller(begin + group, count);
        for (std::int64_t k = begin; k < end; ++k) {
            const char* const row = rows.data<const char>() + k * dim * dtype_bytes(dtype);
            const Extremes extremes = extremes_of(kernels, row, dtype, dim);
            const RowParameters chosen =
                symmetric ? choose_symmetric(extremes, 127, step) : choose_asymmetric(extremes, -128, 127, step);
            all_scales.data<double>()[k] = static_cast<double>(chosen.scale);
            all_zero_points.data<std::int64_t>()[k] = chosen.zero_point;
        }
    });
    all_scales.store(threads);
    all_zero_points.store(threads);
}

} // namespace gr
