// The attention problem after its checks, and how it is cut into pieces. See ops/custom_sdpa.cpp for its meaning.
#pragma once

#include "operands.h"

namespace gr {

enum class Element : std::uint8_t { Float, Half, BFloat, Int8, Int4, Bool };

// float16 and bfloat16 as they lie in memory; see float16.h.
struct Half {
    std::uint16_t bits;
};
struct BFloat {
    std::uint16_t bits;
};
// Two codes, the first one in the low bits.
struct Int4Pair {
    std::uint8_t bits;
};

static inline bool is_quantized(Element element) {
    return element == Element::Int8 || element == Element::Int4;
}

// What codes are scaled by, or their zero points. Element d of a row has the one at [d / group] along the last stride;
// strides are 0 where one holds for all.
struct Parameters {
    Strided data;
    std::int64_t group;
};

// Key or value rows. Row j is read from `recent` where start <= j < start + new rows and `recent` is present, else from
// `cache`: floats, or codes that stand for float(code - zero_point) * scale.
struct CachedRows {
    Strided cache; // strides in bytes when it is Int4
    Element element;
    Parameters scales;      // float, or double where `wide_scales`
    Parameters zero_points; // of the type of the codes, Int4 in a byte; absent: 0, or 8 for Int4
    bool wide_scales;
    Strided recent; // Attention::exact
};

struct Attention {
    std::int64_t batch, rows, query_heads, kv_heads, group, dim; // B, S, Hq, Hkv, Hq / Hkv, D
    Element query_element;
    Element exact; // of output, recent rows and sinks: that of the query, Float when it is Int8
    Strided query, output;
    Strided query_scales, query_zero_points; // float and int8, one element a row, of an Int8 query
    CachedRows key, value;
    Strided mask; // along batch, row, query head, key; stride 0 where broadcast
    Element mask_element;
    std::int64_t mask_keys; // kv; without a mask -1
    Strided sinks;          // along query heads alone
    Positions start;
    bool causal;
    float scale;
    float softcap;                    // 0: none
    std::int64_t window, sink_tokens; // window 0: none
};

// The keys [0, result) that rows before `row_end` can see, as far as lengths and causality say.
static inline std::int64_t key_limit(const Attention& a, std::int64_t b, std::int64_t row_end) {
    const std::int64_t start = position(a.start, b);
    const std::int64_t valid = a.mask.data != nullptr ? a.mask_keys : start + a.rows;
    return a.causal ? smaller(valid, start + row_end) : valid;
}

// The first key behind the kept ones that row i's window reaches.
static inline std::int64_t window_begin(const Attention& a, std::int64_t b, std::int64_t i) {
    return a.window == 0 ? 0 : larger(0, position(a.start, b) + i - a.window + 1);
}

// Query rows [row_begin, row_end) of the groups of key/value heads [kv_head, kv_head + heads), and the keys [key_begin,
// key_end) they look at: with a window, either some of the first `sink_tokens` keys or none of them.
struct Tile {
    std::int64_t batch, kv_head, heads, row_begin, row_end, key_begin, key_end;
};

// Whether the heads of one position lie side by side, so that a block of positions is one stretch of memory.
static inline bool heads_together(const Attention& a, const CachedRows& rows) {
    const std::int64_t row = rows.element == Element::Int4 ? a.dim / 2 : a.dim;
    return a.kv_heads > 1 && rows.cache.stride[2] == row && rows.cache.stride[1] == a.kv_heads * row;
}

// What the softmax over a part of the keys leaves, for rows = group x (row_end - row_begin), row r = row * group +
// head: maximum [rows], sum of exp(score - maximum) [rows], and the same sum of values [rows, width], width >= D.
struct Partial {
    float* maximum;
    float* sum;
    float* values;
};

// The fast paths of one instruction set. They need every innermost stride of query, output, caches and recent rows to
// be 1, and scales that are floats.
struct AttentionKernels {
    // Tiles of at most this many rows (group x query rows) go to `few`, which reads the cache once and keeps nothing;
    // others to `many`, which first unpacks blocks of keys to floats and takes one head.
    std::int64_t few_rows;
    std::int64_t (*width)(std::int64_t dim); // row pitch of Partial::values
    // Scratch memory for `rows` rows of `heads` heads, in floats.
    std::int64_t (*few_scratch)(const Attention&, std::int64_t rows, std::int64_t heads);
    std::int64_t (*many_scratch)(const Attention&, std::int64_t rows);
    // Both go on from a partial for each head, at first with maximum -inf and zeros, and add the keys of the tile to
    // it. `few`: the partials are `pitch` floats apart.
    void (*few)(const Attention&, const Tile&, const Partial& first, std::int64_t pitch, float* scratch);
    void (*many)(const Attention&, const Tile&, const Partial&, float* scratch);
    // Merges `count` partials, each `pitch` floats after the one before, in order, and writes the output of the tile.
    void (*finish)(const Attention&, const Tile&, const Partial& first, std::int64_t count, std::int64_t pitch);
};

} // namespace gr
