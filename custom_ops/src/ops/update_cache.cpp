#include "../attributes.h"
#include "../update.h"

namespace gr {
namespace {

struct E : TypeVariable<float, std::uint8_t, std::int8_t, std::int32_t, std::int64_t, bool, Float16, double, BFloat16> {
    static constexpr const char* name = "E";
};

void update_cache(const Call& call, Input<E> value, Input<E> cache, Input<std::int64_t> start_pos,
                  InPlace<E, 1> new_cache, ModeAttribute mode, LayoutAttribute layout) {
    CacheUpdate(call.op, "value", value, "cache", cache, "new_cache", new_cache, start_pos, layout.layout(),
                mode.circular() ? CacheMode::Circular : CacheMode::Linear)
        .run(call.threads);
}

GR_OPERATOR("UpdateCache", 1, update_cache, "value[B,S,H,D], cache[B,C,H,D], start_pos -> new_cache[B,C,H,D]",
            R"(Writes the new rows `value` into a cache; every other row of `new_cache` is the cache's.

`start_pos` is a scalar, `[1]`, or `[B]` with one position for each sequence. Row i goes to position `start_pos + i`:

- `write_mode` "linear": that slot. `0 <= start_pos` and `start_pos + S <= C`.
- `write_mode` "circular": that slot modulo C, for any `start_pos >= 0`. Of more than C rows only the last C are
  stored, as if all had been written one after the other.

Elements are moved as they are, whatever their type. When `new_cache` shares the buffer of `cache`, only the new rows
are written, so the cost does not depend on C.)");

} // namespace
} // namespace gr
