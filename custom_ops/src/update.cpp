#include "update.h"

#include <cstring>

#include "error.h"

namespace gr {
namespace {

constexpr const char* kLikeCache = "like the cache";

// Copies sequence rows [begin, end) of one head, `begin` counted in each of source and target.
void copy_rows(const Strided& from, std::int64_t from_row, const Strided& to, std::int64_t to_row, std::int64_t rows,
               std::int64_t dim, std::int64_t item) {
    const auto* source = static_cast<const char*>(from.data) + from_row * from.stride[1] * item;
    auto* target = static_cast<char*>(to.data) + to_row * to.stride[1] * item;
    const bool dense = (from.stride[3] == 1 && to.stride[3] == 1) || dim == 1;
    for (std::int64_t s = 0; s < rows; ++s, source += from.stride[1] * item, target += to.stride[1] * item) {
        if (dense) {
            std::memcpy(target, source, static_cast<std::size_t>(dim * item));
            continue;
        }
        for (std::int64_t d = 0; d < dim; ++d)
            std::memcpy(target + d * to.stride[3] * item, source + d * from.stride[3] * item,
                        static_cast<std::size_t>(item));
    }
}

Strided head_of(const View& view, std::int64_t b, std::int64_t h) {
    Strided strided = view.strided();
    strided.data =
        static_cast<char*>(strided.data) + (b * strided.stride[0] + h * strided.stride[2]) * dtype_bytes(view.dtype());
    return strided;
}

} // namespace

void copy_cache(const View& cache, const View& output, const Threads& threads) {
    if (output.empty() || output.tensor().data == cache.tensor().data)
        return;
    const std::int64_t heads = cache.size(kHead), item = dtype_bytes(cache.dtype());
    if (cache.contiguous() && output.contiguous()) {
        std::memcpy(output.tensor().data, cache.tensor().data, cache.bytes().end - cache.bytes().begin);
        return;
    }
    threads.run(static_cast<std::size_t>(cache.size(kBatch) * heads), [&](std::size_t index, std::size_t) {
        const std::int64_t b = static_cast<std::int64_t>(index) / heads, h = static_cast<std::int64_t>(index) % heads;
        copy_rows(head_of(cache, b, h), 0, head_of(output, b, h), 0, cache.size(kSequence), cache.size(kDim), item);
    });
}

void check_pair(const View& cache, const View& output) {
    output.require_dtype({cache.dtype()});
    output.require_shape(cache.size(kBatch), cache.size(kSequence), cache.size(kHead), cache.size(kDim), kLikeCache);
    require_writable(output);
    require_disjoint(output, cache, true);
}

CacheUpdate::CacheUpdate(const char* op, const char* value_name, const GrTensor* value, const char* cache_name,
                         const GrTensor* cache, const char* output_name, const GrTensor* output,
                         const GrTensor* start_pos, Layout layout)
    : value_(op, value_name, value, layout), cache_(op, cache_name, cache, layout),
      output_(op, output_name, output, layout) {
    value_.require_dtype({cache_.dtype()});
    value_.require_shape(cache_.size(kBatch), value_.size(kSequence), cache_.size(kHead), cache_.size(kDim),
                         kLikeCache);
    start_ = check_positions(op, start_pos, cache_.size(kBatch), value_.size(kSequence), cache_.size(kSequence));
    check_pair(cache_, output_);
    require_disjoint(output_, value_, false);
    require_disjoint(output_, Argument(op, "start_pos", start_pos), false);
}

void CacheUpdate::run(const Threads& threads) const {
    copy_cache(cache_, output_, threads);
    const std::int64_t heads = cache_.size(kHead), item = dtype_bytes(cache_.dtype());
    for (std::int64_t b = 0; b < cache_.size(kBatch); ++b)
        for (std::int64_t h = 0; h < heads; ++h)
            copy_rows(head_of(value_, b, h), 0, head_of(output_, b, h), position(start_, b), value_.size(kSequence),
                      cache_.size(kDim), item);
}

} // namespace gr
