// Checked views of the tensors a caller passes. A view is in B, S, H, D order whatever the layout of its tensor, so
// nothing after the checks needs to know of layouts.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "graphrewrite/kernels.h"
#include "operands.h"

namespace gr {

enum class Layout { BSNH, BNSH };

Layout parse_layout(const char* op, const char* text);

const char* dtype_name(std::int32_t dtype);
std::int64_t dtype_bytes(std::int32_t dtype); // 0: not a dtype this library reads

// "[1,2,3]"
std::string shape_text(const GrTensor& tensor);

// The bytes from the first to behind the last element. begin == end when the tensor is empty.
struct ByteRange {
    std::uintptr_t begin = 0, end = 0;
    bool overlaps(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

// A present argument: its rank, shape, strides, dtype and extent make sense in themselves.
class Argument {
public:
    // Throws when `tensor` is NULL or is not a tensor a program may read.
    Argument(const char* op, const char* name, const GrTensor* tensor);

    const char* op() const { return op_; }
    const char* name() const { return name_; }
    const GrTensor& tensor() const { return *tensor_; }
    std::int32_t dtype() const { return tensor_->dtype; }
    std::int64_t stride(std::int32_t dimension) const;
    bool empty() const { return bytes_.begin == bytes_.end; }
    bool contiguous() const;
    const ByteRange& bytes() const { return bytes_; }

    void require_dtype(std::initializer_list<std::int32_t> allowed) const;

private:
    const char* op_;
    const char* name_;
    const GrTensor* tensor_;
    ByteRange bytes_;
};

enum Axis { kBatch = 0, kSequence = 1, kHead = 2, kDim = 3 };

// A rank-4 argument in B, S, H, D order.
class View : public Argument {
public:
    View(const char* op, const char* name, const GrTensor* tensor, Layout layout);

    std::int64_t size(Axis axis) const { return tensor().shape[dimension(axis)]; }
    std::int64_t stride(Axis axis) const { return Argument::stride(dimension(axis)); }
    Strided strided() const;

    // Throws unless the sizes along B, S, H, D are `expected`; `reason` ends the message.
    void require_shape(std::int64_t batch, std::int64_t sequence, std::int64_t heads, std::int64_t dim,
                       const char* reason) const;

private:
    std::int32_t dimension(Axis axis) const;
    Layout layout_;
};

// start_pos: one position for all sequences or one for each. Checked against the rows it must leave room for.
Positions check_positions(const char* op, const GrTensor* start_pos, std::int64_t batch, std::int64_t new_rows,
                          std::int64_t capacity);

// An output that may not share memory with `other`, except exactly where `in_place`.
void require_disjoint(const Argument& output, const Argument& other, bool in_place);

// No two elements of an output may lie at one address.
void require_writable(const Argument& output);

} // namespace gr
