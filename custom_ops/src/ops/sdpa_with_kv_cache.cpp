#include "../attend.h"
#include "../attention_check.h"
#include "../attributes.h"
#include "../isa.h"
#include "../op.h"
#include "../update.h"

namespace gr {
namespace {

struct T : TypeVariable<float, Float16, BFloat16> {
    static constexpr const char* name = "T";
};
struct U : TypeVariable<float, Float16, BFloat16> {
    static constexpr const char* name = "U";
};
struct M : TypeVariable<bool, float, Float16, BFloat16> {
    static constexpr const char* name = "M";
};

// No output may share memory with what another output, or the attention, still needs.
void keep_apart(const char* op, const AttentionArguments& arguments, const CacheUpdate& update,
                const CacheUpdate& other) {
    const View query(op, "query", arguments.query, arguments.layout);
    const View output(op, "output", arguments.output, arguments.layout);
    for (const View* view : {&other.value(), &other.cache(), &other.output(), &query, &output})
        require_disjoint(update.output(), *view, false);
    if (arguments.attn_mask != nullptr)
        require_disjoint(update.output(), Argument(op, "attn_mask", arguments.attn_mask), false);
    if (arguments.sinks != nullptr)
        require_disjoint(update.output(), Argument(op, "sinks", arguments.sinks), false);
    require_disjoint(output, update.value(), false);
    require_disjoint(output, update.cache(), false);
}

void sdpa_with_kv_cache(const Call& call, Input<T> query, Input<U> key, Input<U> value, Input<U> key_cache,
                        Input<U> value_cache, Input<std::int64_t> start_pos, OptionalInput<M> attn_mask,
                        OptionalInput<T> sinks, Output<T, 0> output, InPlace<U, 3> new_key_cache,
                        InPlace<U, 4> new_value_cache, CausalAttribute is_causal, ScaleAttribute scale,
                        SoftcapAttribute softcap, WindowAttribute window, SinkTokensAttribute sink_tokens,
                        LayoutAttribute layout) {
    const CacheUpdate keys(call.op, "key", key, "key_cache", key_cache, "new_key_cache", new_key_cache, start_pos,
                           layout.layout());
    const CacheUpdate values(call.op, "value", value, "value_cache", value_cache, "new_value_cache", new_value_cache,
                             start_pos, layout.layout());
    keys.cache().require_dtype({GR_FLOAT, GR_FLOAT16, GR_BFLOAT16});
    const View rows(call.op, "query", query, layout.layout());
    for (const View* written : {&keys.value(), &values.value()})
        if (written->size(kSequence) != rows.size(kSequence))
            fail(call.op, written->name(), " has ", written->size(kSequence), " new rows, but query has ",
                 rows.size(kSequence));
    const AttentionArguments arguments{
        query,           new_key_cache, new_value_cache, start_pos,         nullptr,        nullptr, nullptr,
        nullptr,         nullptr,       nullptr,         attn_mask,         sinks,          output,  is_causal.value,
        scale.pointer(), softcap.value, window.value,    sink_tokens.value, layout.layout()};
    keep_apart(call.op, arguments, keys, values);
    keep_apart(call.op, arguments, values, keys);
    // Its memory is there before the caches change, which an error would leave half written.
    const PreparedAttention attention(check_attention(call.op, arguments), active_kernels(call.op).attention,
                                      call.threads);
    keys.run(call.threads);
    values.run(call.threads);
    attention.run();
}

GR_OPERATOR("SdpaWithKvCache", 1, sdpa_with_kv_cache,
            "query[B,S,Hq,D], key[B,S,Hkv,D], value[B,S,Hkv,D], key_cache[B,C,Hkv,D], value_cache[B,C,Hkv,D], "
            "start_pos, attn_mask, sinks[Hq] -> output[B,S,Hq,D], new_key_cache[B,C,Hkv,D], "
            "new_value_cache[B,C,Hkv,D]",
            R"(Writes `key` and `value` into their caches at `start_pos`, as UpdateCache does, then attends to the new
caches, as CustomSdpa does with the same attributes. The caches hold floats of one type, which need not be that of the
query. Kept for models that have the two as one operator; separate ones say the same.)");

} // namespace
} // namespace gr
