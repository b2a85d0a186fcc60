#include "update_quantized.h"

#include <cmath>
#include <optional>
#include <vector>

#include "error.h"
#include "isa.h"
#include "quantized_rows.h"

namespace gr {
namespace {

// The codes of a cache.
struct CodeType {
    bool packed; // int4
    float low, high;

    explicit CodeType(std::int32_t dtype)
        : packed(dtype == GR_UINT8), low(packed ? 0.0f : -128.0f), high(packed ? 15.0f : 127.0f) {}
    std::int8_t middle() const { return packed ? 8 : 0; }
};

// One of codes, scales and zero points: the input and the output that replaces it.
struct Pair {
    View before, after;

    Pair(const char* op, const char* before_name, const GrTensor* input, const char* after_name, const GrTensor* output,
         Layout layout)
        : before(op, before_name, input, layout), after(op, after_name, output, layout) {}
};

// Chooses scale and zero point of each group of a row.
class DynamicQuantizer : public RowQuantizer {
public:
    DynamicQuantizer(const QuantizationKernels& kernels, CodeType type, const QuantizedUpdate& update,
                     const View& scales, const View* zero_points, std::int64_t dim)
        : kernels_(kernels), type_(type), symmetric_(update.scheme == Scheme::Symmetric),
          round_first_(update.round_first), scales_(scales.strided()),
          zero_points_(zero_points != nullptr ? zero_points->strided() : Strided{}), groups_(scales.size(kDim)),
          length_(dim / groups_) {}

    void quantize(const float* row, std::int64_t b, std::int64_t slot, std::int64_t h,
                  std::int8_t* codes) const override {
        for (std::int64_t g = 0; g < groups_; ++g, row += length_, codes += length_) {
            const RowParameters chosen = symmetric_ ? quantize_symmetric(row, codes) : quantize_asymmetric(row, codes);
            *at<float>(scales_, b, slot, h, g) = chosen.scale;
            // The least int64, which stands for NaN, becomes 0, as where torch converts it.
            if (zero_points_.data != nullptr)
                *at<std::int8_t>(zero_points_, b, slot, h, g) = static_cast<std::int8_t>(chosen.zero_point);
        }
    }

private:
    RowParameters quantize_asymmetric(const float* row, std::int8_t* codes) const {
        const RowParameters chosen = choose_asymmetric(kernels_.extremes(row, length_), type_.low, type_.high);
        // torch's per-token operators hold scales in float64, torchao's affine ones in float32.
        if (round_first_)
            kernels_.quantize<float>().run(row, length_, chosen.scale, static_cast<float>(chosen.zero_point),
                                           {type_.low, type_.high, true, false}, codes);
        else
            kernels_.quantize<double>().run(row, length_, chosen.scale, static_cast<double>(chosen.zero_point),
                                            {type_.low, type_.high, false, false}, codes);
        return chosen;
    }

    // int4 codes are -8..7 here; packing adds 8, and the zero point that stands beside them is that 8.
    RowParameters quantize_symmetric(const float* row, std::int8_t* codes) const {
        const auto middle = static_cast<float>(type_.middle());
        const RowParameters chosen = choose_symmetric(kernels_.extremes(row, length_), type_.high - middle);
        kernels_.quantize<float>().run(row, length_, chosen.scale, 0,
                                       {type_.low - middle, type_.high - middle, false, false}, codes);
        return {chosen.scale, type_.middle()};
    }

    const QuantizationKernels& kernels_;
    CodeType type_;
    bool symmetric_, round_first_;
    Strided scales_, zero_points_;
    std::int64_t groups_, length_;
};

// Scales or zero points that all rows share: of shape [H, D] or one that broadcasts to it.
struct Shared : Argument {
    std::int64_t stride[2] = {0, 0}; // along H and D

    Shared(const char* op, const char* name, const GrTensor* given, std::int64_t heads, std::int64_t dim)
        : Argument(op, name, given) {
        const std::int64_t sizes[] = {heads, dim};
        bool fits = given->rank <= 2;
        for (std::int32_t d = 0; fits && d < given->rank; ++d) {
            const std::int32_t axis = d + 2 - given->rank;
            fits = given->shape[d] == 1 || given->shape[d] == sizes[axis];
            stride[axis] = given->shape[d] == 1 ? 0 : Argument::stride(d);
        }
        if (!fits)
            fail(op, name, " has shape ", shape_text(*given), ", expected one that broadcasts to [", heads, ",", dim,
                 "], heads and elements, with the scheme \"static\"");
    }

    template <typename T> T value(std::int64_t h, std::int64_t d) const {
        return static_cast<const T*>(tensor().data)[h * stride[0] + d * stride[1]];
    }
};

// Uses the given scales and zero points, and divides as ONNX's QuantizeLinear does.
template <typename F> class StaticQuantizer : public RowQuantizer {
public:
    StaticQuantizer(const QuantizationKernels& kernels, CodeType type, bool round_first, const Shared& scales,
                    const Shared* zero_points, std::int64_t heads, std::int64_t dim)
        : kernels_(kernels), rule_{type.low, type.high, round_first, true}, dim_(dim) {
        scales_.reserve(static_cast<std::size_t>(heads * dim));
        zero_points_.reserve(static_cast<std::size_t>(heads * dim));
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t d = 0; d < dim; ++d) {
                const F scale = scales.value<F>(h, d);
                if (!std::isfinite(scale) || scale <= 0)
                    fail(scales.op(), "scales has ", std::to_string(scale), " for element ", d, " of head ", h,
                         ", expected a positive finite number");
                scales_.push_back(scale);
                zero_points_.push_back(static_cast<F>(zero_point(type, zero_points, h, d)));
            }
    }

    void quantize(const float* row, std::int64_t, std::int64_t, std::int64_t h, std::int8_t* codes) const override {
        kernels_.quantize<F>().each(row, dim_, scales_.data() + h * dim_, zero_points_.data() + h * dim_, rule_, codes);
    }

private:
    static std::int32_t zero_point(CodeType type, const Shared* zero_points, std::int64_t h, std::int64_t d) {
        if (zero_points == nullptr)
            return type.middle();
        return type.packed ? zero_points->value<std::uint8_t>(h, d) : zero_points->value<std::int8_t>(h, d);
    }

    const QuantizationKernels& kernels_;
    QuantizeRule<F> rule_;
    std::vector<F> scales_, zero_points_; // [H, D]
    std::int64_t dim_;
};

// No output may share memory with an input, save its own, or with another output.
void check_apart(const std::vector<const Pair*>& pairs, const std::vector<const Argument*>& inputs) {
    for (const Pair* pair : pairs) {
        check_pair(pair->before, pair->after);
        for (const Argument* input : inputs)
            require_disjoint(pair->after, *input, false);
        for (const Pair* other : pairs)
            if (other != pair) {
                require_disjoint(pair->after, other->before, false);
                require_disjoint(pair->after, other->after, false);
            }
    }
}

void check_presence(const char* op, const QuantizedUpdate& update) {
    const bool zero_points = update.zero_points != nullptr;
    if (update.scheme == Scheme::Static) {
        if (update.new_scales != nullptr || update.new_zero_points != nullptr)
            fail(op, update.new_scales != nullptr ? "new_scales" : "new_zero_points",
                 " is an output, and the scheme \"static\" changes neither scales "
                 "nor zero points");
        return;
    }
    if (update.scheme == Scheme::Asymmetric && !zero_points)
        fail(op, "zero_points is missing, and the scheme \"asymmetric\" needs it");
    if (update.new_scales == nullptr)
        fail(op, "new_scales is missing");
    if (zero_points != (update.new_zero_points != nullptr))
        fail(op, zero_points ? "zero_points is given but new_zero_points is not an output"
                             : "new_zero_points is an output but zero_points is missing");
}

// Scales or zero points of groups, like codes.
void check_groups(const Pair& groups, const View& codes, std::int64_t count) {
    groups.before.require_shape(codes.size(kBatch), codes.size(kSequence), codes.size(kHead), count,
                                "like codes with one element a group");
}

void check_group_count(const View& scales, std::int64_t dim, bool packed) {
    const std::int64_t count = scales.size(kDim);
    if (count == 0 || dim == 0 || dim % count != 0)
        fail(scales.op(), "scales has shape ", shape_text(scales.tensor()), ", and ", count,
             " groups do not divide rows of ", dim, " elements");
    if (packed && dim / count % 2 != 0)
        fail(scales.op(), "scales has shape ", shape_text(scales.tensor()), ", and groups of ", dim / count,
             " elements share bytes of int4 codes");
}

// What every scheme has in common, checked.
struct CodeUpdate {
    View value;
    Pair codes;
    CodeType type;
    std::int64_t heads, dim;
    Positions start;
    Argument start_pos;

    CodeUpdate(const char* op, const QuantizedUpdate& update)
        : value(op, "value", update.value, update.layout),
          codes(op, "codes", update.codes, "new_codes", update.new_codes, update.layout), type(codes.before.dtype()),
          heads(codes.before.size(kHead)), dim(codes.before.size(kDim) * (type.packed ? 2 : 1)),
          start_pos(op, "start_pos", update.start_pos) {
        const View& cache = codes.before;
        value.require_dtype({GR_FLOAT, GR_FLOAT16, GR_BFLOAT16});
        cache.require_dtype({GR_INT8, GR_UINT8});
        value.require_shape(cache.size(kBatch), value.size(kSequence), heads, dim,
                            type.packed ? "like codes, which hold two elements a byte" : "like codes");
        start = check_start(op, update.start_pos, cache.size(kBatch), value.size(kSequence), cache.size(kSequence),
                            update.mode);
    }

    // Writes `pairs`, nothing of which can fail once it has begun.
    void run(const QuantizationKernels& kernels, const RowQuantizer& quantizer, std::int8_t offset,
             const std::vector<const Pair*>& pairs, const Threads& threads) const {
        const View& cache = codes.before;
        const CodeRows rows{value.strided(),
                            codes.after.strided(),
                            value.dtype(),
                            type.packed,
                            offset,
                            start,
                            cache.size(kBatch),
                            value.size(kSequence),
                            heads,
                            dim,
                            cache.size(kSequence)};
        const Scratch scratch(rows.scratch_bytes(threads));
        for (const Pair* pair : pairs)
            copy_cache(pair->before, pair->after, threads);
        rows.run(kernels, quantizer, threads, scratch);
    }
};

void update_static(const char* op, const QuantizedUpdate& update, const CodeUpdate& common, const Threads& threads) {
    const Shared scales(op, "scales", update.scales, common.heads, common.dim);
    scales.require_dtype({GR_FLOAT, GR_DOUBLE});
    std::optional<Shared> zero_points;
    std::vector<const Argument*> inputs{&common.value, &common.start_pos, &scales};
    if (update.zero_points != nullptr) {
        zero_points.emplace(op, "zero_points", update.zero_points, common.heads, common.dim);
        zero_points->require_dtype({common.codes.before.dtype()});
        inputs.push_back(&*zero_points);
    }
    check_apart({&common.codes}, inputs);
    const QuantizationKernels& kernels = *active_kernels(op).quantization;
    const auto run = [&](const RowQuantizer& quantizer) {
        common.run(kernels, quantizer, 0, {&common.codes}, threads);
    };
    const Shared* const points = zero_points ? &*zero_points : nullptr;
    if (scales.dtype() == GR_DOUBLE)
        run(StaticQuantizer<double>(kernels, common.type, update.round_first, scales, points, common.heads,
                                    common.dim));
    else
        run(StaticQuantizer<float>(kernels, common.type, update.round_first, scales, points, common.heads, common.dim));
}

void update_dynamic(const char* op, const QuantizedUpdate& update, const CodeUpdate& common, const Threads& threads) {
    const View& codes = common.codes.before;
    const Pair scales(op, "scales", update.scales, "new_scales", update.new_scales, update.layout);
    scales.before.require_dtype({GR_FLOAT});
    check_group_count(scales.before, common.dim, common.type.packed);
    check_groups(scales, codes, scales.before.size(kDim));
    std::vector<const Pair*> pairs{&common.codes, &scales};
    std::optional<Pair> zero_points;
    if (update.zero_points != nullptr) {
        zero_points.emplace(op, "zero_points", update.zero_points, "new_zero_points", update.new_zero_points,
                            update.layout);
        zero_points->before.require_dtype({codes.dtype()});
        check_groups(*zero_points, codes, scales.before.size(kDim));
        pairs.push_back(&*zero_points);
    }
    check_apart(pairs, {&common.value, &common.start_pos});
    const QuantizationKernels& kernels = *active_kernels(op).quantization;
    const DynamicQuantizer quantizer(kernels, common.type, update, scales.after,
                                     zero_points ? &zero_points->after : nullptr, common.dim);
    const std::int8_t offset = update.scheme == Scheme::Symmetric ? common.type.middle() : 0;
    common.run(kernels, quantizer, offset, pairs, threads);
}

} // namespace

void update_quantized_cache(const char* op, const QuantizedUpdate& update, const Threads& threads) {
    check_presence(op, update);
    const CodeUpdate common(op, update);
    if (update.scheme == Scheme::Static)
        update_static(op, update, common, threads);
    else
        update_dynamic(op, update, common, threads);
}

} // namespace gr
