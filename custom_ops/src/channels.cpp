#include "channels.h"

#include "dense.h"
#include "error.h"
#include "isa.h"
#include "widen.h"

namespace gr {
namespace {

constexpr std::int64_t kJobElements = 65536;
// Where channels alternate quickly and all come round within this many elements, scales and zero points are laid out
// repeatedly, one for each element of a table of about this size.
constexpr std::int64_t kTable = 2048;
constexpr std::int64_t kShortRun = 64;  // elements of one channel side by side
constexpr std::int64_t kBlock = 512;    // elements that go through a buffer at once
constexpr std::int64_t kLongRun = 512;  // elements of one channel, or of different ones, in a call of a kernel
constexpr std::int64_t kColumns = 1024; // channels whose scales and zero points stay in the nearest cache
constexpr std::int64_t kStreamBytes = std::int64_t{16} << 20; // results this large do not stay in a cache

// A zero point of any width.
std::int64_t read_integer(const Dense& integers, std::int32_t dtype, std::int64_t index) {
    if (dtype == GR_INT8)
        return integers.data<std::int8_t>()[index];
    if (dtype == GR_INT32)
        return integers.data<std::int32_t>()[index];
    return integers.data<std::int64_t>()[index];
}

bool is_narrow(std::int64_t zero_point) {
    return zero_point >= -kLargestNarrowZeroPoint && zero_point <= kLargestNarrowZeroPoint;
}

// The tensors side by side.
struct DenseOperands {
    Dense elements, scales, output;
    std::optional<Dense> zero_points;

    explicit DenseOperands(const ChannelOperands& operands)
        : elements(operands.elements), scales(operands.scales), output(operands.output) {
        if (operands.zero_points)
            zero_points.emplace(*operands.zero_points);
    }
    void load(const Threads& threads) const {
        elements.load(threads);
        scales.load(threads);
        if (zero_points)
            zero_points->load(threads);
    }
};

// Scales and zero points as the kernels take them. Where each element has another channel than the one before, they lie
// side by side and repeat; elsewhere there are runs of elements of one channel.
template <typename F, typename Zero> class ChannelParameters {
public:
    ChannelParameters(const ChannelOperands& operands, const DenseOperands& dense)
        : scales_(dense.scales.data<F>()), zero_points_(dense.zero_points ? &*dense.zero_points : nullptr),
          zero_point_dtype_(operands.zero_points ? operands.zero_points->dtype() : GR_INT64), count_(operands.count),
          inner_(operands.inner) {
        if (!are_laid_out(operands))
            return;
        const std::int64_t period = count_ * inner_, repeats = smaller(operands.outer, larger(1, kTable / period));
        const auto channel = [&](std::int64_t k) { return repeats * inner_ == 1 ? k : k / inner_ % count_; };
        const std::int64_t length = repeats * period;
        if (zero_points_ != nullptr) {
            zero_point_table_.reserve(static_cast<std::size_t>(length));
            for (std::int64_t k = 0; k < length; ++k)
                zero_point_table_.push_back(static_cast<Zero>(zero_point(channel(k))));
        }
        if (length > count_) {
            scale_table_.reserve(static_cast<std::size_t>(length));
            for (std::int64_t k = 0; k < length; ++k)
                scale_table_.push_back(scales_[channel(k)]);
            scales_ = scale_table_.data();
        }
        count_ = length;
        inner_ = 1;
    }
    ChannelParameters(const ChannelParameters&) = delete;
    ChannelParameters& operator=(const ChannelParameters&) = delete;

    // How many elements one call of a kernel gets.
    std::int64_t run_length() const { return inner_ == 1 ? count_ : inner_; }

    // The same as `visit` for parameters that lie side by side, a part of them at a time for all the rows that they
    // come round in, so that they stay in the nearest cache.
    template <typename Each> void visit_by_columns(std::int64_t begin, std::int64_t end, const Each& each) const {
        for (std::int64_t column = 0; column < count_; column += kColumns)
            for (std::int64_t row = begin / count_ * count_; row < end; row += count_) {
                const std::int64_t first = larger(begin, row + column);
                const std::int64_t last = smaller(end, row + smaller(column + kColumns, count_));
                if (first < last)
                    each(first, last - first, scales_ + (first - row),
                         zero_points_ == nullptr ? nullptr : zero_point_table_.data() + (first - row));
            }
    }
    bool is_wide() const { return inner_ == 1 && count_ > kColumns; }

    static bool are_laid_out(const ChannelOperands& operands) {
        return operands.inner == 1 || (operands.inner < kShortRun && operands.count * operands.inner < kTable);
    }

    // For all elements from `begin` to `end`, at most `limit` at once, calls run(first, count, scale, zero_point) with
    // some of one channel, or each(first, count, scales, zero_points) with some that have their own ones.
    template <typename Run, typename Each>
    void visit(std::int64_t begin, std::int64_t end, std::int64_t limit, const Run& run, const Each& each) const {
        std::int64_t channel = begin / inner_ % count_, within = begin % inner_;
        while (begin < end) {
            const std::int64_t rest = inner_ == 1 ? count_ - channel : inner_ - within;
            const std::int64_t length = smaller(smaller(end - begin, limit), rest);
            if (inner_ == 1)
                each(begin, length, scales_ + channel,
                     zero_points_ == nullptr ? nullptr : zero_point_table_.data() + channel);
            else
                run(begin, length, scales_[channel], zero_point(channel));
            begin += length;
            if (length < rest)
                (inner_ == 1 ? channel : within) += length;
            else
                within = 0, channel = inner_ == 1 || channel + 1 == count_ ? 0 : channel + 1;
        }
    }

private:
    std::int64_t zero_point(std::int64_t channel) const {
        return zero_points_ == nullptr ? 0 : read_integer(*zero_points_, zero_point_dtype_, channel);
    }

    const F* scales_;
    const Dense* zero_points_; // NULL: 0
    std::int32_t zero_point_dtype_;
    std::int64_t count_, inner_;
    std::vector<F> scale_table_;
    std::vector<Zero> zero_point_table_;
};

// How many elements `p` lies behind the beginning of a cache line.
std::int64_t misaligned(const float* p) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p) % 64 / sizeof(float));
}

// Calls job(begin, end) for parts of all elements.
template <typename Job> void run_jobs(std::int64_t total, const Threads& threads, const Job& job) {
    threads.run(static_cast<std::size_t>(divide_up(total, kJobElements)), [&](std::size_t index, std::size_t) {
        const std::int64_t begin = static_cast<std::int64_t>(index) * kJobElements;
        job(begin, smaller(begin + kJobElements, total));
    });
}

template <typename F>
void quantize(const ChannelOperands& operands, const DenseOperands& dense, const QuantizeRule<F>& rule,
              const Threads& threads) {
    const ChannelParameters<F, F> parameters(operands, dense);
    const QuantizeKernels<F>& kernels = active_kernels(operands.elements.op()).quantization->quantize<F>();
    const std::int32_t dtype = operands.elements.dtype();
    const char* const values = dense.elements.data<const char>();
    auto* const codes = dense.output.data<std::int8_t>();
    run_jobs(operands.total(), threads, [&](std::int64_t begin, std::int64_t end) {
        float block[kBlock];
        const auto floats = [&](std::int64_t first, std::int64_t count) -> const float* {
            const char* const source = values + first * dtype_bytes(dtype);
            if (dtype == GR_FLOAT)
                return reinterpret_cast<const float*>(source);
            widen(source, dtype, 1, count, block);
            return block;
        };
        parameters.visit(
            begin, end, kBlock,
            [&](std::int64_t first, std::int64_t count, F scale, std::int64_t zero_point) {
                kernels.run(floats(first, count), count, scale, static_cast<F>(zero_point), rule, codes + first);
            },
            [&](std::int64_t first, std::int64_t count, const F* scales, const F* zero_points) {
                kernels.each(floats(first, count), count, scales, zero_points, rule, codes + first);
            });
    });
}

template <typename Q, typename F, typename Zero>
void dequantize_with(const DequantizeKernels<Q, F, Zero>& kernels, const DequantizationKernels& all,
                     const ChannelOperands& operands, const DenseOperands& dense, const Threads& threads) {
    const ChannelParameters<F, Zero> parameters(operands, dense);
    const auto* const codes = dense.elements.data<const Q>();
    auto* const values = dense.output.data<float>();
    const auto convert = [&](std::int64_t begin, std::int64_t end, bool stream, float* to) {
        const auto each = [&](std::int64_t first, std::int64_t count, const F* scales, const Zero* zero_points) {
            kernels.each(codes + first, count, scales, zero_points, stream, to + (first - begin));
        };
        if (parameters.is_wide())
            return parameters.visit_by_columns(begin, end, each);
        parameters.visit(
            begin, end, end,
            [&](std::int64_t first, std::int64_t count, F scale, std::int64_t zero_point) {
                float* const target = to + (first - begin);
                if (is_narrow(zero_point))
                    kernels.run(codes + first, count, scale, static_cast<Zero>(zero_point), stream, target);
                else
                    wide_dequantize<Q, F>().run(codes + first, count, scale, zero_point, stream, target);
            },
            each);
    };
    const bool stream = operands.total() * static_cast<std::int64_t>(sizeof(float)) >= kStreamBytes;
    const bool whole_lines = misaligned(values) == 0 && parameters.run_length() % 16 == 0;
    const bool by_blocks = stream && !whole_lines && parameters.run_length() < kLongRun;
    run_jobs(operands.total(), threads, [&](std::int64_t begin, std::int64_t end) {
        if (!by_blocks)
            convert(begin, end, stream, values + begin);
        // By way of a block in the nearest cache, so that whole lines are written although runs end within them.
        alignas(64) float block[kBlock];
        for (std::int64_t first = begin, next; by_blocks && first < end; first = next) {
            next = smaller(first + kBlock - misaligned(values + first), end);
            convert(first, next, false, block);
            all.stream(block, next - first, codes + first, values + first);
        }
        if (stream)
            all.finish_streams();
    });
}

// Whether the fast kernels can take zero points that lie side by side.
bool are_narrow(const ChannelOperands& operands, const std::optional<Dense>& zero_points) {
    for (std::int64_t k = 0; zero_points && k < operands.count; ++k)
        if (!is_narrow(read_integer(*zero_points, operands.zero_points->dtype(), k)))
            return false;
    return true;
}

template <typename Q, typename F>
void dequantize(const ChannelOperands& operands, const DenseOperands& dense, const Threads& threads) {
    const DequantizationKernels& all = *active_kernels(operands.elements.op()).dequantization;
    if (!ChannelParameters<F, float>::are_laid_out(operands) || are_narrow(operands, dense.zero_points))
        dequantize_with(all.dequantize<Q, F>(), all, operands, dense, threads);
    else
        dequantize_with(wide_dequantize<Q, F>(), all, operands, dense, threads);
}

std::vector<std::int64_t> shape_of(const Argument& argument) {
    const GrTensor& tensor = argument.tensor();
    return {tensor.shape, tensor.shape + tensor.rank};
}

void require_shape(const Argument& argument, const std::vector<std::int64_t>& expected, const std::string& reason) {
    if (shape_of(argument) != expected)
        fail(argument.op(), argument.name(), " has shape ", shape_text(argument.tensor()), ", expected ",
             shape_text({nullptr, GR_FLOAT, static_cast<std::int32_t>(expected.size()), expected.data(), nullptr}), " ",
             reason);
}

} // namespace

ChannelOperands::ChannelOperands(const char* op, const char* name, const GrTensor* elements_tensor,
                                 const GrTensor* scales_tensor, const GrTensor* zero_points_tensor,
                                 const char* output_name, const GrTensor* output_tensor)
    : elements(op, name, elements_tensor), scales(op, "scales", scales_tensor), output(op, output_name, output_tensor) {
    if (elements.tensor().rank == 0)
        fail(op, name, " has shape [], expected rank 1 or more");
    scales.require_dtype({GR_FLOAT, GR_DOUBLE});
    require_shape(output, shape_of(elements), std::string("like ") + name);
    require_writable(output);
    require_disjoint(output, elements, false);
    require_disjoint(output, scales, false);
    if (zero_points_tensor != nullptr) {
        zero_points.emplace(op, "zero_points", zero_points_tensor);
        zero_points->require_dtype({GR_INT8, GR_INT32, GR_INT64});
        require_disjoint(output, *zero_points, false);
    }
}

void ChannelOperands::check_parameters(const std::vector<std::int64_t>& shape, const std::string& reason) const {
    require_shape(scales, shape, reason);
    if (zero_points)
        require_shape(*zero_points, shape, reason);
}

ChannelOperands ChannelOperands::per_channel(const char* op, const char* name, const GrTensor* elements,
                                             const GrTensor* scales, const GrTensor* zero_points,
                                             const char* output_name, const GrTensor* output, std::int64_t axis) {
    ChannelOperands operands(op, name, elements, scales, zero_points, output_name, output);
    const std::int64_t rank = elements->rank;
    if (axis < -rank || axis >= rank)
        fail(op, "axis ", axis, " is outside [", -rank, ", ", rank - 1, "] for ", name, " of shape ",
             shape_text(*elements));
    axis = axis < 0 ? axis + rank : axis;
    const std::int64_t count = elements->shape[axis];
    operands.check_parameters({count}, "for the channels of axis " + std::to_string(axis) + " of " + name);
    if (operands.elements.empty())
        return operands;
    operands.outer = operands.inner = 1;
    operands.count = count;
    for (std::int64_t d = 0; d < rank; ++d)
        if (d != axis)
            (d < axis ? operands.outer : operands.inner) *= elements->shape[d];
    return operands;
}

ChannelOperands ChannelOperands::per_token(const char* op, const char* name, const GrTensor* elements,
                                           const GrTensor* scales, const GrTensor* zero_points, const char* output_name,
                                           const GrTensor* output) {
    ChannelOperands operands(op, name, elements, scales, zero_points, output_name, output);
    std::vector<std::int64_t> shape = shape_of(operands.elements);
    const std::int64_t dim = shape.back();
    shape.back() = 1;
    operands.check_parameters(shape, std::string("for the rows of ") + name);
    if (operands.elements.empty())
        return operands;
    operands.outer = operands.count = 1;
    operands.inner = dim;
    for (const std::int64_t size : shape)
        operands.count *= size;
    return operands;
}

void quantize_channels(const ChannelOperands& operands, std::int64_t quant_min, std::int64_t quant_max,
                       bool round_first, const Threads& threads) {
    operands.elements.require_dtype({GR_FLOAT, GR_FLOAT16, GR_BFLOAT16});
    operands.output.require_dtype({GR_INT8});
    if (quant_min < -128 || quant_max > 127 || quant_min > quant_max)
        fail(operands.elements.op(), "quant_min ", quant_min, " and quant_max ", quant_max,
             " are no range within [-128, 127]");
    if (operands.elements.empty())
        return;
    const DenseOperands dense(operands);
    dense.load(threads);
    const auto low = static_cast<float>(quant_min), high = static_cast<float>(quant_max);
    if (operands.scales.dtype() == GR_DOUBLE)
        quantize<double>(operands, dense, {low, high, round_first, false}, threads);
    else
        quantize<float>(operands, dense, {low, high, round_first, false}, threads);
    dense.output.store(threads);
}

void dequantize_channels(const ChannelOperands& operands, const Threads& threads) {
    operands.elements.require_dtype({GR_INT8, GR_UINT8});
    operands.output.require_dtype({GR_FLOAT});
    if (operands.elements.empty())
        return;
    const DenseOperands dense(operands);
    dense.load(threads);
    const bool is_signed = operands.elements.dtype() == GR_INT8, is_double = operands.scales.dtype() == GR_DOUBLE;
    (is_signed   ? is_double ? dequantize<std::int8_t, double> : dequantize<std::int8_t, float>
     : is_double ? dequantize<std::uint8_t, double>
                 : dequantize<std::uint8_t, float>)(operands, dense, threads);
    dense.output.store(threads);
}

} // namespace gr
