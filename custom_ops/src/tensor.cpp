#include "tensor.h"

#include <cstring>
#include <limits>

#include "error.h"

namespace gr {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr std::int32_t kMaxRank = 8;

// a * b + c for values that are not negative; throws past 63 bits.
std::int64_t multiply_add(const Argument& argument, std::int64_t a, std::int64_t b, std::int64_t c) {
    if (b != 0 && a > (kLargest - c) / b)
        fail(argument.op(), argument.name(), " of shape ", shape_text(argument.tensor()), " exceeds 63-bit offsets");
    return a * b + c;
}

bool is_empty(const GrTensor& tensor) {
    for (std::int32_t d = 0; d < tensor.rank; ++d)
        if (tensor.shape[d] == 0)
            return true;
    return false;
}

ByteRange extent(const Argument& argument) {
    const GrTensor& tensor = argument.tensor();
    if (is_empty(tensor))
        return {};
    std::int64_t last = 0, dense = 1;
    for (std::int32_t d = tensor.rank - 1; d >= 0; --d) {
        const std::int64_t size = tensor.shape[d];
        last = multiply_add(argument, size - 1, tensor.strides != nullptr ? tensor.strides[d] : dense, last);
        dense = multiply_add(argument, size, dense, 0);
    }
    const std::int64_t item = dtype_bytes(tensor.dtype);
    multiply_add(argument, dense, item, 0); // a copy of it can be counted in bytes
    const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data);
    return {begin, begin + static_cast<std::uintptr_t>(multiply_add(argument, last, item, item))};
}

void check_form(const char* op, const char* name, const GrTensor* tensor) {
    if (tensor == nullptr)
        fail(op, name, " is missing");
    if (dtype_bytes(tensor->dtype) == 0)
        fail(op, name, " has element type ", tensor->dtype, ", which is not supported");
    if (tensor->rank < 0 || tensor->rank > kMaxRank)
        fail(op, name, " has rank ", tensor->rank, ", expected 0 to ", kMaxRank);
    if (tensor->rank > 0 && tensor->shape == nullptr)
        fail(op, name, " has no shape");
    for (std::int32_t d = 0; d < tensor->rank; ++d) {
        if (tensor->shape[d] < 0)
            fail(op, name, " has shape ", shape_text(*tensor), ", which is negative in dimension ", d);
        if (tensor->strides != nullptr && tensor->strides[d] < 0)
            fail(op, name, " has the negative stride ", tensor->strides[d], " in dimension ", d);
    }
    if (is_empty(*tensor))
        return;
    if (tensor->data == nullptr)
        fail(op, name, " of shape ", shape_text(*tensor), " has no data");
    if (reinterpret_cast<std::uintptr_t>(tensor->data) % static_cast<std::uintptr_t>(dtype_bytes(tensor->dtype)) != 0)
        fail(op, name, " does not lie at a multiple of the ", dtype_bytes(tensor->dtype), " bytes of its elements");
}

} // namespace

Layout parse_layout(const char* op, const char* text) {
    if (text == nullptr || std::strcmp(text, "BSNH") == 0)
        return Layout::BSNH;
    if (std::strcmp(text, "BNSH") == 0)
        return Layout::BNSH;
    fail(op, "layout \"", text, "\" is unknown, expected \"BSNH\" or \"BNSH\"");
}

const char* dtype_name(std::int32_t dtype) {
    switch (dtype) {
    case GR_FLOAT:
        return "float32";
    case GR_UINT8:
        return "uint8";
    case GR_INT8:
        return "int8";
    case GR_INT32:
        return "int32";
    case GR_INT64:
        return "int64";
    case GR_BOOL:
        return "bool";
    case GR_FLOAT16:
        return "float16";
    case GR_DOUBLE:
        return "float64";
    case GR_BFLOAT16:
        return "bfloat16";
    default:
        return "unknown";
    }
}

std::int64_t dtype_bytes(std::int32_t dtype) {
    switch (dtype) {
    case GR_UINT8:
    case GR_INT8:
    case GR_BOOL:
        return 1;
    case GR_FLOAT16:
    case GR_BFLOAT16:
        return 2;
    case GR_FLOAT:
    case GR_INT32:
        return 4;
    case GR_INT64:
    case GR_DOUBLE:
        return 8;
    default:
        return 0;
    }
}

std::string shape_text(const GrTensor& tensor) {
    std::string text = "[";
    for (std::int32_t d = 0; d < tensor.rank; ++d)
        text += (d > 0 ? "," : "") + std::to_string(tensor.shape[d]);
    return text + "]";
}

Argument::Argument(const char* op, const char* name, const GrTensor* tensor) : op_(op), name_(name), tensor_(tensor) {
    check_form(op, name, tensor);
    bytes_ = extent(*this);
}

std::int64_t Argument::stride(std::int32_t dimension) const {
    if (tensor_->strides != nullptr)
        return tensor_->strides[dimension];
    // Unsigned: an empty tensor may name sizes whose product exceeds 63 bits, and its strides are never used.
    std::uint64_t dense = 1;
    for (std::int32_t d = tensor_->rank - 1; d > dimension; --d)
        dense *= static_cast<std::uint64_t>(tensor_->shape[d]);
    return static_cast<std::int64_t>(dense);
}

bool Argument::contiguous() const {
    if (empty())
        return true;
    std::int64_t dense = 1;
    for (std::int32_t d = tensor_->rank - 1; d >= 0; --d) {
        if (tensor_->shape[d] > 1 && stride(d) != dense)
            return false;
        dense *= tensor_->shape[d];
    }
    return true;
}

void Argument::require_dtype(std::initializer_list<std::int32_t> allowed) const {
    std::string names;
    for (const std::int32_t candidate : allowed) {
        if (dtype() == candidate)
            return;
        names += (names.empty() ? "" : " or ") + std::string(dtype_name(candidate));
    }
    fail(op_, name_, " has element type ", dtype_name(dtype()), ", expected ", names);
}

View::View(const char* op, const char* name, const GrTensor* tensor, Layout layout)
    : Argument(op, name, tensor), layout_(layout) {
    if (tensor->rank != 4)
        fail(op, name, " has shape ", shape_text(*tensor), ", expected rank 4 (",
             layout == Layout::BSNH ? "[B,S,H,D]" : "[B,H,S,D]", ")");
}

std::int32_t View::dimension(Axis axis) const {
    if (layout_ == Layout::BSNH)
        return axis;
    return axis == kSequence ? 2 : axis == kHead ? 1 : static_cast<std::int32_t>(axis);
}

Strided View::strided() const {
    return {tensor().data, {stride(kBatch), stride(kSequence), stride(kHead), stride(kDim)}};
}

void View::require_shape(std::int64_t batch, std::int64_t sequence, std::int64_t heads, std::int64_t dim,
                         const char* reason) const {
    const std::int64_t sizes[4] = {batch, sequence, heads, dim};
    std::int64_t expected[4];
    bool equal = true;
    for (const Axis axis : {kBatch, kSequence, kHead, kDim}) {
        expected[dimension(axis)] = sizes[axis];
        equal = equal && size(axis) == sizes[axis];
    }
    if (!equal)
        fail(op(), name(), " has shape ", shape_text(tensor()), ", expected ",
             shape_text({nullptr, GR_FLOAT, 4, expected, nullptr}), " ", reason);
}

Positions check_positions(const char* op, const GrTensor* start_pos, std::int64_t batch, std::int64_t new_rows,
                          std::int64_t capacity) {
    const Argument argument(op, "start_pos", start_pos);
    argument.require_dtype({GR_INT64});
    const bool scalar = start_pos->rank == 0 || (start_pos->rank == 1 && start_pos->shape[0] == 1);
    if (!scalar && (start_pos->rank != 1 || start_pos->shape[0] != batch))
        fail(op, "start_pos has shape ", shape_text(*start_pos), ", expected a scalar or [", batch,
             "], one position per sequence");
    const Positions positions{static_cast<const std::int64_t*>(start_pos->data), scalar ? 0 : argument.stride(0)};
    const std::int64_t count = scalar ? 1 : batch;
    for (std::int64_t b = 0; b < count; ++b) {
        const std::int64_t start = position(positions, b);
        const std::string where = count > 1 ? " of sequence " + std::to_string(b) : "";
        if (start < 0)
            fail(op, "start_pos ", start, where, " is negative");
        if (new_rows > capacity || start > capacity - new_rows)
            fail(op, "start_pos ", start, where, " + ", new_rows, " new rows exceeds the cache capacity ", capacity);
    }
    return positions;
}

void require_disjoint(const Argument& output, const Argument& other, bool in_place) {
    if (!output.bytes().overlaps(other.bytes()))
        return;
    bool same = in_place && output.tensor().data == other.tensor().data;
    for (std::int32_t d = 0; same && d < output.tensor().rank; ++d)
        same = output.stride(d) == other.stride(d) || output.tensor().shape[d] == 1;
    if (!same)
        fail(output.op(), output.name(), " overlaps ", other.name(), " in memory",
             in_place ? "; it must be the same tensor or lie elsewhere" : "");
}

void require_writable(const Argument& output) {
    if (output.empty())
        return;
    // Sorted by stride, each dimension must step over all that the faster ones reach.
    const GrTensor& tensor = output.tensor();
    std::int64_t reach = 0;
    std::int32_t order[kMaxRank];
    for (std::int32_t d = 0; d < tensor.rank; ++d) {
        std::int32_t place = d;
        for (; place > 0 && output.stride(order[place - 1]) > output.stride(d); --place)
            order[place] = order[place - 1];
        order[place] = d;
    }
    for (std::int32_t k = 0; k < tensor.rank; ++k) {
        const std::int32_t d = order[k];
        if (tensor.shape[d] == 1)
            continue;
        if (output.stride(d) <= reach)
            fail(output.op(), output.name(), " has stride ", output.stride(d), " in dimension ", d,
                 ", so its elements overlap each other");
        reach += (tensor.shape[d] - 1) * output.stride(d);
    }
}

} // namespace gr
