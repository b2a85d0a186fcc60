#include "update.h"

#include <cstring>
#include <limits>

#include "copy.h"
#include "error.h"

namespace gr {
namespace {

constexpr const char* kLikeCache = "like the cache";
constexpr std::int64_t kJobElements = 32768;

// The elements of some rows of some sequences; `from` and `to` begin at the first.
void copy_rows(const Strided& from, const Strided& to, const View& cache, std::int64_t batch, std::int64_t rows,
               const Threads& threads) {
    CopyShape shape;
    const std::int64_t sizes[] = {batch, rows, cache.size(kHead), cache.size(kDim)};
    for (const Axis axis : {kBatch, kSequence, kHead, kDim})
        shape.add(sizes[axis], from.stride[axis], to.stride[axis]);
    copy_elements(from.data, to.data, dtype_bytes(cache.dtype()), shape, threads);
}

char* advanced(const Strided& strided, std::int64_t elements, std::int64_t item) {
    return static_cast<char*>(strided.data) + elements * item;
}

// What begins at a row of a sequence.
Strided from_row(const View& view, std::int64_t b, std::int64_t s) {
    Strided strided = view.strided();
    strided.data =
        advanced(strided, b * strided.stride[kBatch] + s * strided.stride[kSequence], dtype_bytes(view.dtype()));
    return strided;
}

} // namespace

void copy_cache(const View& cache, const View& output, const Threads& threads) {
    if (!output.empty() && output.tensor().data != cache.tensor().data)
        copy_rows(cache.strided(), output.strided(), cache, cache.size(kBatch), cache.size(kSequence), threads);
}

void check_pair(const View& cache, const View& output) {
    output.require_dtype({cache.dtype()});
    output.require_shape(cache.size(kBatch), cache.size(kSequence), cache.size(kHead), cache.size(kDim), kLikeCache);
    require_writable(output);
    require_disjoint(output, cache, true);
}

Positions check_start(const char* op, const GrTensor* start_pos, std::int64_t batch, std::int64_t new_rows,
                      std::int64_t capacity, CacheMode mode) {
    if (mode == CacheMode::Linear)
        return check_positions(op, start_pos, batch, new_rows, capacity);
    if (capacity == 0 && new_rows > 0)
        fail(op, "the cache capacity 0 leaves no slot for ", new_rows, " new rows");
    return check_positions(op, start_pos, batch, 0, std::numeric_limits<std::int64_t>::max());
}

std::int64_t skipped_rows(std::int64_t new_rows, std::int64_t capacity) {
    return larger(0, new_rows - capacity);
}

CacheOperands::CacheOperands(const char* op, const char* value_name, const GrTensor* value_tensor,
                             const char* cache_name, const GrTensor* cache_tensor, const char* output_name,
                             const GrTensor* output_tensor, Layout layout)
    : value(op, value_name, value_tensor, layout), cache(op, cache_name, cache_tensor, layout),
      output(op, output_name, output_tensor, layout) {
    value.require_dtype({cache.dtype()});
    value.require_shape(cache.size(kBatch), value.size(kSequence), cache.size(kHead), cache.size(kDim), kLikeCache);
    check_pair(cache, output);
    require_disjoint(output, value, false);
}

CacheUpdate::CacheUpdate(const char* op, const char* value_name, const GrTensor* value, const char* cache_name,
                         const GrTensor* cache, const char* output_name, const GrTensor* output,
                         const GrTensor* start_pos, Layout layout, CacheMode mode)
    : operands_(op, value_name, value, cache_name, cache, output_name, output, layout), mode_(mode) {
    start_ = check_start(op, start_pos, this->cache().size(kBatch), this->value().size(kSequence),
                         this->cache().size(kSequence), mode);
    require_disjoint(this->output(), Argument(op, "start_pos", start_pos), false);
}

void CacheUpdate::run(const Threads& threads) const {
    copy_cache(cache(), output(), threads);
    if (value().empty())
        return;
    const std::int64_t capacity = cache().size(kSequence), batch = cache().size(kBatch);
    const std::int64_t rows = value().size(kSequence), skipped = skipped_rows(rows, capacity);
    // With one position for all, all sequences are one copy.
    const std::int64_t together = start_.stride == 0 ? batch : 1;
    for (std::int64_t b = 0; b < batch; b += together) {
        const std::int64_t slot = (position(start_, b) % capacity + skipped % capacity) % capacity;
        const std::int64_t kept = rows - skipped, before_end = smaller(kept, capacity - slot);
        copy_rows(from_row(value(), b, skipped), from_row(output(), b, slot), cache(), together, before_end, threads);
        // The rest of a ring's rows begins at its first slot.
        copy_rows(from_row(value(), b, skipped + before_end), from_row(output(), b, 0), cache(), together,
                  kept - before_end, threads);
    }
}

IndexedCacheUpdate::IndexedCacheUpdate(const char* op, const GrTensor* value, const GrTensor* cache,
                                       const GrTensor* indices, const GrTensor* new_cache, Layout layout)
    : operands_(op, "value", value, "cache", cache, "new_cache", new_cache, layout) {
    const std::int64_t batch = operands_.cache.size(kBatch), rows = operands_.value.size(kSequence);
    const std::int64_t capacity = operands_.cache.size(kSequence);
    const Argument argument(op, "indices", indices);
    argument.require_dtype({GR_INT64});
    require_disjoint(operands_.output, argument, false);
    const std::int32_t rank = indices->rank;
    const bool per_sequence = rank == 2 && indices->shape[0] != 1;
    if ((rank != 1 && rank != 2) || indices->shape[rank - 1] != rows || (per_sequence && indices->shape[0] != batch))
        fail(op, "indices has shape ", shape_text(*indices), ", expected [", batch, ",", rows, "], [1,", rows, "] or [",
             rows, "], one slot per row of value");
    indices_ = static_cast<const std::int64_t*>(indices->data);
    index_stride_[0] = per_sequence ? argument.stride(0) : 0;
    index_stride_[1] = argument.stride(rank - 1);
    for (std::int64_t b = 0; b < (per_sequence ? batch : smaller(batch, 1)); ++b)
        for (std::int64_t s = 0; s < rows; ++s)
            if (slot(b, s) < 0 || slot(b, s) >= capacity)
                fail(op, "indices has ", slot(b, s), " for row ", s, per_sequence ? " of sequence " : "",
                     per_sequence ? std::to_string(b) : "", ", outside the cache of capacity ", capacity);
}

void IndexedCacheUpdate::run(const Threads& threads) const {
    const View &cache = operands_.cache, &value = operands_.value, &output = operands_.output;
    copy_cache(cache, output, threads);
    if (value.empty())
        return;
    // A job has some heads of one sequence with all their rows, in order: of rows for one slot the last one stays.
    const std::int64_t heads = cache.size(kHead), rows = value.size(kSequence), dim = cache.size(kDim);
    const std::int64_t group = smaller(heads, larger(1, kJobElements / (rows * dim)));
    const std::int64_t groups = divide_up(heads, group);
    const std::int64_t item = dtype_bytes(cache.dtype());
    const Strided from = value.strided(), to = output.strided();
    const Threads alone(nullptr);
    threads.run(static_cast<std::size_t>(cache.size(kBatch) * groups), [&](std::size_t index, std::size_t) {
        const std::int64_t b = static_cast<std::int64_t>(index) / groups;
        const std::int64_t first = static_cast<std::int64_t>(index) % groups * group;
        CopyShape shape;
        shape.add(smaller(group, heads - first), from.stride[kHead], to.stride[kHead]);
        shape.add(dim, from.stride[kDim], to.stride[kDim]);
        for (std::int64_t s = 0; s < rows; ++s) {
            const std::int64_t source = b * from.stride[kBatch] + s * from.stride[kSequence];
            const std::int64_t target = b * to.stride[kBatch] + slot(b, s) * to.stride[kSequence];
            copy_elements(advanced(from, source + first * from.stride[kHead], item),
                          advanced(to, target + first * to.stride[kHead], item), item, shape, alone);
        }
    });
}

} // namespace gr
