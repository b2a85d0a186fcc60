#include "copy.h"

#include <cstring>

#include "operands.h"

namespace gr {
namespace {

constexpr std::int64_t kJobBytes = 131072; // what a job copies, some ten microseconds' worth

// The same copy with as few dimensions as describe it, the one that is densest in the target last.
CopyShape simplified(const CopyShape& shape) {
    CopyShape sorted;
    for (int d = 0; d < shape.rank; ++d) {
        if (shape.size[d] == 1)
            continue;
        int place = sorted.rank++;
        for (; place > 0 && sorted.to[place - 1] < shape.to[d]; --place) {
            sorted.size[place] = sorted.size[place - 1];
            sorted.from[place] = sorted.from[place - 1];
            sorted.to[place] = sorted.to[place - 1];
        }
        sorted.size[place] = shape.size[d];
        sorted.from[place] = shape.from[d];
        sorted.to[place] = shape.to[d];
    }
    CopyShape merged;
    for (int d = 0; d < sorted.rank; ++d) {
        const int last = merged.rank - 1;
        if (last >= 0 && merged.from[last] == sorted.size[d] * sorted.from[d] &&
            merged.to[last] == sorted.size[d] * sorted.to[d]) {
            merged.size[last] *= sorted.size[d];
            merged.from[last] = sorted.from[d];
            merged.to[last] = sorted.to[d];
        } else {
            merged.add(sorted.size[d], sorted.from[d], sorted.to[d]);
        }
    }
    if (merged.rank == 0)
        merged.add(1, 1, 1);
    return merged;
}

template <int Item>
void copy_strided(const char* from, std::int64_t from_stride, char* to, std::int64_t to_stride, std::int64_t count) {
    for (std::int64_t k = 0; k < count; ++k)
        std::memcpy(to + k * to_stride * Item, from + k * from_stride * Item, Item);
}

void copy_run(const char* from, std::int64_t from_stride, char* to, std::int64_t to_stride, std::int64_t count,
              std::int64_t item) {
    if (from_stride == 1 && to_stride == 1)
        std::memcpy(to, from, static_cast<std::size_t>(count * item));
    else if (item == 1)
        copy_strided<1>(from, from_stride, to, to_stride, count);
    else if (item == 2)
        copy_strided<2>(from, from_stride, to, to_stride, count);
    else if (item == 4)
        copy_strided<4>(from, from_stride, to, to_stride, count);
    else
        copy_strided<8>(from, from_stride, to, to_stride, count);
}

} // namespace

void copy_elements(const void* from, void* to, std::int64_t item, const CopyShape& any_shape, const Threads& threads) {
    std::int64_t total = 1;
    for (int d = 0; d < any_shape.rank; ++d)
        total *= any_shape.size[d];
    if (total == 0)
        return;
    const CopyShape shape = simplified(any_shape);
    const int last = shape.rank - 1;
    // The last dimension is copied in pieces of equal size; a job is a number of pieces.
    const std::int64_t length = shape.size[last], piece = smaller(length, larger(1, kJobBytes / item));
    const std::int64_t pieces = divide_up(length, piece), all = total / length * pieces;
    const std::int64_t job = larger(1, kJobBytes / (piece * item));
    threads.run(static_cast<std::size_t>(divide_up(all, job)), [&](std::size_t index, std::size_t) {
        const std::int64_t begin = static_cast<std::int64_t>(index) * job, end = smaller(begin + job, all);
        for (std::int64_t n = begin; n < end; ++n) {
            const std::int64_t first = n % pieces * piece;
            std::int64_t source = first * shape.from[last], target = first * shape.to[last], rest = n / pieces;
            for (int d = last - 1; d >= 0; rest /= shape.size[d], --d) {
                source += rest % shape.size[d] * shape.from[d];
                target += rest % shape.size[d] * shape.to[d];
            }
            copy_run(static_cast<const char*>(from) + source * item, shape.from[last],
                     static_cast<char*>(to) + target * item, shape.to[last], smaller(piece, length - first), item);
        }
    });
}

} // namespace gr
