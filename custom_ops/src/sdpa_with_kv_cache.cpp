#include "attention_check.h"
#include "error.h"
#include "isa.h"
#include "update.h"

namespace gr {

void sdpa_with_kv_cache(const char* op, const AttentionArguments& arguments, const GrTensor* key, const GrTensor* value,
                        const GrTensor* new_key_cache, const GrTensor* new_value_cache, const Threads& threads) {
    const Layout layout = arguments.layout;
    const CacheUpdate keys(op, "key", key, "key_cache", arguments.key_cache, "new_key_cache", new_key_cache,
                           arguments.start_pos, layout);
    const CacheUpdate values(op, "value", value, "value_cache", arguments.value_cache, "new_value_cache",
                             new_value_cache, arguments.start_pos, layout);
    keys.cache().require_dtype({GR_FLOAT});
    const View query(op, "query", arguments.query, layout);
    for (const View* rows : {&keys.value(), &values.value()})
        if (rows->size(kSequence) != query.size(kSequence))
            fail(op, rows->name(), " has ", rows->size(kSequence), " new rows, but query has ", query.size(kSequence));

    // No output may share memory with what another output or the attention still needs.
    const View output(op, "output", arguments.output, layout);
    for (const CacheUpdate* update : {&keys, &values}) {
        const CacheUpdate& other = update == &keys ? values : keys;
        for (const View* view : {&other.value(), &other.cache(), &other.output(), &query, &output})
            require_disjoint(update->output(), *view, false);
        if (arguments.attn_mask != nullptr)
            require_disjoint(update->output(), Argument(op, "attn_mask", arguments.attn_mask), false);
        require_disjoint(output, update->value(), false);
        require_disjoint(output, update->cache(), false);
    }

    AttentionArguments updated = arguments;
    updated.key_cache = new_key_cache;
    updated.value_cache = new_value_cache;
    const Attention attention = check_attention(op, updated);
    const Kernels& kernels = active_kernels(op);
    keys.run(threads);
    values.run(threads);
    attend(attention, kernels.attention, threads);
}

} // namespace gr
