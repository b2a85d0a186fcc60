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

// Of a dtype that attention reads.
Element element_of(const Argument& argument) {
    switch (argument.dtype()) {
    case GR_FLOAT16:
        return Element::Half;
    case GR_BFLOAT16:
        return Element::BFloat;
    case GR_INT8:
        return Element::Int8;
    case GR_UINT8:
        return Element::Int4;
    case GR_BOOL:
        return Element::Bool;
    default:
        return Element::Float;
    }
}

class Checker {
public:
    Checker(const char* op, const AttentionArguments& arguments)
        : op_(op), arguments_(arguments), query_(op, "query", arguments.query, arguments.layout),
          key_(op, "key_cache", arguments.key_cache, arguments.layout),
          output_(op, "output", arguments.output, arguments.layout) {}

    Attention run() {
        Attention a{};
        check_sizes(a);
        check_query(a);
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
        if (a.key.wide_scales != a.value.wide_scales)
            fail(op_, "key_scales has element type ", a.key.wide_scales ? "float64" : "float32", " and value_scales ",
                 a.value.wide_scales ? "float64" : "float32", "; expected the same");
        check_mask(a);
        check_sinks(a);
        check_options(a);
        return a;
    }

private:
    void check_sizes(Attention& a) {
        key_.require_dtype({GR_FLOAT, GR_FLOAT16, GR_BFLOAT16, GR_INT8, GR_UINT8});
        a.batch = query_.size(kBatch);
        a.rows = query_.size(kSequence);
        a.query_heads = query_.size(kHead);
        a.dim = query_.size(kDim);
        a.kv_heads = key_.size(kHead);
        capacity_ = key_.size(kSequence);
        if (key_.dtype() == GR_UINT8 && a.dim % 2 != 0)
            fail(op_, "the head size ", a.dim, " of query is odd, and the int4 key_cache has two codes a byte");
        require_cache_shape(a, key_, "with the batch and head size of query");
        if (a.kv_heads == 0 || a.query_heads % a.kv_heads != 0)
            fail(op_, "query has ", a.query_heads, " heads, not a multiple of the ", a.kv_heads, " heads of key_cache");
        a.group = a.query_heads / a.kv_heads;
        output_.require_shape(a.batch, a.rows, a.query_heads, a.dim, "like query");
        require_writable(output_);
    }

    void require_cache_shape(const Attention& a, const View& cache, const char* reason) const {
        const bool is_int4 = key_.dtype() == GR_UINT8;
        cache.require_shape(a.batch, capacity_, a.kv_heads, is_int4 ? a.dim / 2 : a.dim,
                            is_int4 ? (std::string(reason) + ", two int4 codes a byte").c_str() : reason);
    }

    void check_query(Attention& a) const {
        const bool is_quantized = arguments_.query_scales != nullptr;
        if (is_quantized) {
            query_.require_dtype({GR_INT8});
            output_.require_dtype({GR_FLOAT});
            a.query_scales = check_query_companion(a, "query_scales", arguments_.query_scales, GR_FLOAT);
            if (arguments_.query_zero_points != nullptr)
                a.query_zero_points =
                    check_query_companion(a, "query_zero_points", arguments_.query_zero_points, GR_INT8);
        } else {
            query_.require_dtype({GR_FLOAT, GR_FLOAT16, GR_BFLOAT16});
            output_.require_dtype({query_.dtype()});
        }
        keep_apart(query_);
        a.query = query_.strided();
        a.output = output_.strided();
        a.query_element = element_of(query_);
        a.exact = element_of(output_);
    }

    Strided check_query_companion(const Attention& a, const char* name, const GrTensor* tensor,
                                  std::int32_t dtype) const {
        const View view(op_, name, tensor, arguments_.layout);
        view.require_dtype({dtype});
        view.require_shape(a.batch, a.rows, a.query_heads, 1, "like query with one element a row");
        keep_apart(view);
        return view.strided();
    }

    void keep_apart(const Argument& input) const { require_disjoint(output_, input, false); }

    CachedRows check_rows(const Attention& a, const RowsArguments& rows) const {
        CachedRows result{};
        const View cache(op_, rows.cache_name, rows.cache, arguments_.layout);
        cache.require_dtype({key_.dtype()});
        require_cache_shape(a, cache, "like key_cache");
        keep_apart(cache);
        result.cache = cache.strided();
        result.element = element_of(cache);
        check_parameters(a, rows, cache, result);
        if (rows.recent != nullptr) {
            const View recent(op_, rows.recent_name, rows.recent, arguments_.layout);
            recent.require_dtype({output_.dtype()});
            recent.require_shape(a.batch, a.rows, a.kv_heads, a.dim, "for the new rows");
            keep_apart(recent);
            result.recent = recent.strided();
        }
        return result;
    }

    void check_parameters(const Attention& a, const RowsArguments& rows, const View& cache, CachedRows& result) const {
        if (!is_quantized(result.element)) {
            for (const auto& [name, tensor] :
                 {std::pair{rows.scales_name, rows.scales}, std::pair{rows.zero_points_name, rows.zero_points}})
                if (tensor != nullptr)
                    fail(op_, name, " is given, but ", rows.cache_name, " is ", dtype_name(cache.dtype()),
                         " and takes none");
            return;
        }
        if (rows.scales == nullptr)
            fail(op_, rows.scales_name, " is missing, and the ", result.element == Element::Int4 ? "int4 " : "int8 ",
                 rows.cache_name, " needs it");
        const Argument scales(op_, rows.scales_name, rows.scales);
        scales.require_dtype({GR_FLOAT, GR_DOUBLE});
        result.scales = check_granularity(a, scales);
        result.wide_scales = scales.dtype() == GR_DOUBLE;
        if (result.wide_scales && rows.scales->rank == 4)
            fail(op_, rows.scales_name, " of shape ", shape_text(*rows.scales),
                 " has element type float64, which only scales that hold for all rows may have; expected float32");
        if (rows.zero_points == nullptr)
            return;
        const Argument zero_points(op_, rows.zero_points_name, rows.zero_points);
        zero_points.require_dtype({cache.dtype()});
        result.zero_points = check_granularity(a, zero_points);
        if (rows.scales->rank == 4 && rows.zero_points->rank == 4 && result.zero_points.group != result.scales.group)
            fail(op_, rows.zero_points_name, " has shape ", shape_text(*rows.zero_points), ", but ", rows.scales_name,
                 " has shape ", shape_text(*rows.scales), ": the numbers of groups differ");
    }

    // Scales or zero points for each row, in groups along it, or for all rows.
    Parameters check_granularity(const Attention& a, const Argument& argument) const {
        const GrTensor& tensor = argument.tensor();
        keep_apart(argument);
        if (tensor.rank == 4) {
            const View view(op_, argument.name(), &tensor, arguments_.layout);
            const std::int64_t groups = view.size(kDim);
            view.require_shape(a.batch, capacity_, a.kv_heads, groups, "like the cache with one element a group");
            if (groups == 0 || a.dim % groups != 0)
                fail(op_, argument.name(), " has shape ", shape_text(tensor), ", and the head size ", a.dim,
                     " does not fall into ", groups, " equal groups");
            return {view.strided(), a.dim / groups};
        }
        const bool by_head = tensor.rank == 2 && tensor.shape[0] == a.kv_heads && tensor.shape[0] != 1;
        const bool by_element = tensor.rank > 0 && tensor.shape[tensor.rank - 1] == a.dim && a.dim != 1;
        const bool fits = tensor.rank <= 2 && (tensor.rank < 2 || by_head || tensor.shape[0] == 1) &&
                          (tensor.rank < 1 || by_element || tensor.shape[tensor.rank - 1] == 1);
        if (!fits)
            fail(op_, argument.name(), " has shape ", shape_text(tensor),
                 ", expected rank 4 with one element a group, or [], [1], [", a.dim, "], [", a.kv_heads, ",1] or [",
                 a.kv_heads, ",", a.dim, "] for all rows");
        return {
            {tensor.data, {0, 0, by_head ? argument.stride(0) : 0, by_element ? argument.stride(tensor.rank - 1) : 0}},
            by_element ? 1 : a.dim};
    }

    void check_mask(Attention& a) const {
        a.mask_keys = -1;
        if (arguments_.attn_mask == nullptr)
            return;
        const Argument mask(op_, "attn_mask", arguments_.attn_mask);
        const GrTensor& tensor = mask.tensor();
        mask.require_dtype({GR_BOOL, GR_FLOAT, GR_FLOAT16, GR_BFLOAT16});
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
        a.mask_element = element_of(mask);
        // A mask without keys may come without data, but it still hides everything.
        static char nothing;
        if (a.mask.data == nullptr)
            a.mask.data = &nothing;
    }

    void check_sinks(Attention& a) const {
        if (arguments_.sinks == nullptr)
            return;
        const Argument sinks(op_, "sinks", arguments_.sinks);
        sinks.require_dtype({output_.dtype()});
        if (sinks.tensor().rank != 1 || sinks.tensor().shape[0] != a.query_heads)
            fail(op_, "sinks has shape ", shape_text(sinks.tensor()), ", expected [", a.query_heads,
                 "], one for each head of query");
        keep_apart(sinks);
        a.sinks = {sinks.tensor().data, {0, 0, sinks.stride(0), 0}};
    }

    void check_options(Attention& a) const {
        a.causal = arguments_.causal;
        a.scale = arguments_.scale != nullptr ? *arguments_.scale : 1.0f / std::sqrt(static_cast<float>(a.dim));
        a.softcap = arguments_.softcap;
        a.window = arguments_.window;
        a.sink_tokens = arguments_.sink_tokens;
    }

    const char* op_;
    const AttentionArguments& arguments_;
    const View query_, key_, output_;
    std::int64_t capacity_ = 0;
};

} // namespace

Attention check_attention(const char* op, const AttentionArguments& arguments) {
    return Checker(op, arguments).run();
}

} // namespace gr
