#include "attention_check.h"

#include <cmath>

#include "error.h"

namespace gr {
namespace {

// The tensors that make up one of key and value, by the names messages use.
struct RowsArguments {
    const char *cache_name, *scales_name, *zero_points_name, *recent_name;
    const GrTensor *cache, *scales, *zero_points, *recent;
};

class Checker {
public:
    Checker(const char* op, const AttentionArguments& arguments)
        : op_(op), arguments_(arguments), query_(op, "query", arguments.query, arguments.layout),
          key_(op, "key_cache", arguments.key_cache, arguments.layout),
          output_(op, "output", arguments.output, arguments.layout) {}

    Attention run() {
        Attention a{};
        check_sizes(a);
        a.start = check_positions(op_, arguments_.start_pos, a.batch, a.rows, capacity_);
        keep_apart(Argument(op_, "start_pos", arguments_.start_pos));
        if ((arguments_.recent_key == nullptr) != (arguments_.recent_value == nullptr))
            fail(op_, arguments_.recent_key == nullptr ? "recent_value is given without recent_key"
                                                       : "recent_key is given without recent_value");
        a.key = check_rows(a, {"key_cache", "key_scales", "key_zero_points", "recent_key", arguments_.key_cache,
                               arguments_.key_scales, arguments_.key_zero_points, arguments_.recent_key});
        a.value =
            check_rows(a, {"value_cache", "value_scales", "value_zero_points", "recent_value", arguments_.value_cache,
                           arguments_.value_scales, arguments_.value_zero_points, arguments_.recent_value});
        check_mask(a);
        a.causal = arguments_.causal;
        a.scale = arguments_.scale != nullptr ? *arguments_.scale : 1.0f / std::sqrt(static_cast<float>(a.dim));
        if (a.dim > 0)
            check_scale(op_, a.scale);
        return a;
    }

private:
    void check_sizes(Attention& a) {
        query_.require_dtype({GR_FLOAT});
        key_.require_dtype({GR_FLOAT, GR_INT8});
        output_.require_dtype({GR_FLOAT});
        a.batch = query_.size(kBatch);
        a.rows = query_.size(kSequence);
        a.query_heads = query_.size(kHead);
        a.dim = query_.size(kDim);
        a.kv_heads = key_.size(kHead);
        capacity_ = key_.size(kSequence);
        key_.require_shape(a.batch, capacity_, a.kv_heads, a.dim, "with the batch and head size of query");
        if (a.kv_heads == 0 || a.query_heads % a.kv_heads != 0)
            fail(op_, "query has ", a.query_heads, " heads, not a multiple of the ", a.kv_heads, " heads of key_cache");
        a.group = a.query_heads / a.kv_heads;
        output_.require_shape(a.batch, a.rows, a.query_heads, a.dim, "like query");
        require_writable(output_);
        keep_apart(query_);
        a.query = query_.strided();
        a.output = output_.strided();
    }

    void keep_apart(const Argument& input) const { require_disjoint(output_, input, false); }

    // One of the cache's companions that hold one element a row.
    Strided check_per_row(const Attention& a, const char* name, const GrTensor* tensor, std::int32_t dtype) const {
        const View view(op_, name, tensor, arguments_.layout);
        view.require_dtype({dtype});
        view.require_shape(a.batch, capacity_, a.kv_heads, 1, "like the cache with one element a row");
        keep_apart(view);
        return view.strided();
    }

    CachedRows check_rows(const Attention& a, const RowsArguments& rows) const {
        CachedRows result{};
        const View cache(op_, rows.cache_name, rows.cache, arguments_.layout);
        cache.require_dtype({key_.dtype()});
        cache.require_shape(a.batch, capacity_, a.kv_heads, a.dim, "like key_cache");
        keep_apart(cache);
        result.cache = cache.strided();
        result.quantized = cache.dtype() == GR_INT8;
        if (result.quantized && rows.scales == nullptr)
            fail(op_, rows.scales_name, " is missing, and the int8 ", rows.cache_name, " needs it");
        for (const auto& [name, tensor] :
             {std::pair{rows.scales_name, rows.scales}, std::pair{rows.zero_points_name, rows.zero_points}})
            if (!result.quantized && tensor != nullptr)
                fail(op_, name, " is given, but ", rows.cache_name, " is float32 and takes none");
        if (rows.scales != nullptr)
            result.scales = check_per_row(a, rows.scales_name, rows.scales, GR_FLOAT);
        if (rows.zero_points != nullptr)
            result.zero_points = check_per_row(a, rows.zero_points_name, rows.zero_points, GR_INT8);
        if (rows.recent != nullptr) {
            const View recent(op_, rows.recent_name, rows.recent, arguments_.layout);
            recent.require_dtype({GR_FLOAT});
            recent.require_shape(a.batch, a.rows, a.kv_heads, a.dim, "for the new rows");
            keep_apart(recent);
            result.recent = recent.strided();
        }
        return result;
    }

    void check_mask(Attention& a) const {
        a.mask_keys = -1;
        if (arguments_.attn_mask == nullptr)
            return;
        const Argument mask(op_, "attn_mask", arguments_.attn_mask);
        const GrTensor& tensor = mask.tensor();
        mask.require_dtype({GR_BOOL, GR_FLOAT});
        if (tensor.rank < 2 || tensor.rank > 4)
            fail(op_, "attn_mask has shape ", shape_text(tensor), ", expected rank 2, 3 or 4");
        // Broadcast from the right over [B, Hq, S]; the keys are never broadcast.
        const std::int64_t sizes[3] = {a.batch, a.query_heads, a.rows};
        const std::int32_t places[3] = {0, 2, 1}; // where Attention::mask keeps the stride
        const std::int32_t keys = tensor.rank - 1;
        for (int axis = 0; axis < 3; ++axis) {
            const std::int32_t dimension = keys - 3 + axis;
            const std::int64_t size = dimension < 0 ? 1 : tensor.shape[dimension];
            if (size != 1 && size != sizes[axis])
                fail(op_, "attn_mask has shape ", shape_text(tensor), ", which does not broadcast to [", sizes[0], ",",
                     sizes[1], ",", sizes[2], ",kv]");
            a.mask.stride[places[axis]] = size == 1 ? 0 : mask.stride(dimension);
        }
        a.mask_keys = tensor.shape[keys];
        if (a.mask_keys > capacity_)
            fail(op_, "attn_mask covers ", a.mask_keys, " keys, more than the cache capacity ", capacity_);
        keep_apart(mask);
        a.mask.stride[3] = mask.stride(keys);
        a.mask.data = tensor.data;
        a.mask_is_bool = tensor.dtype == GR_BOOL;
        // A mask without keys may come without data, but it still hides everything.
        static char nothing;
        if (a.mask.data == nullptr)
            a.mask.data = &nothing;
    }

    const char* op_;
    const AttentionArguments& arguments_;
    const View query_, key_, output_;
    std::int64_t capacity_ = 0;
};

} // namespace

void check_scale(const char* op, float scale) {
    if (!std::isfinite(scale))
        fail(op, "scale ", std::to_string(scale), " is not finite");
}

Attention check_attention(const char* op, const AttentionArguments& arguments) {
    return Checker(op, arguments).run();
}

} // namespace gr
