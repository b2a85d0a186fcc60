#include "../attributes.h"
#include "../update.h"

namespace gr {
namespace {

struct E : TypeVariable<float, std::uint8_t, std::int8_t, std::int32_t, std::int64_t, bool, Float16, double, BFloat16> {
    static constexpr const char* name = "E";
};

void update_cache_with_indices(const Call& call, Input<E> value, Input<E> cache, Input<std::int64_t> indices,
                               InPlace<E, 1> new_cache, LayoutAttribute layout) {
    IndexedCacheUpdate(call.op, value, cache, indices, new_cache, layout.layout()).run(call.threads);
}

GR_OPERATOR("UpdateCacheWithIndices", 1, update_cache_with_indices,
            "value[B,S,H,D], cache[B,C,H,D], indices -> new_cache[B,C,H,D]",
            R"(Writes each new row of `value` into a slot of its own; every other row of `new_cache` is the cache's.

`indices` is `[B,S]`, or `[1,S]` or `[S]` for all sequences alike. Row i of sequence b goes to slot `indices[b,i]`. An
index that is negative or not below C is an error. Of several rows for one slot the last one stays.

Elements are moved as they are, whatever their type. When `new_cache` shares the buffer of `cache`, only the new rows
are written, so the cost does not depend on C.)");

} // namespace
} // namespace gr
