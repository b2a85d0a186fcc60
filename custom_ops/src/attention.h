// The attention problem after its checks, and how it is cut into pieces. See graphrewrite/kernels.h for its meaning.
#pragma once

#include "operands.h"

namespace gr {

// Key or value rows. Row j is read from `recent` where start <= j < start + new rows and `recent` is present, else from
// `cache`: floats, or codes that stand for float(code - zero_point) * scale.
struct CachedRows {
    Strided cache;
    bool quantized;
    Strided scales;      // float
    Strided zero_points; // int8; absent: 0
    Strided recent;      // float
};

struct Attention {
    std::int64_t batch, rows, query_heads, kv_heads, group,
        dim;               // B, S, Hq, Hkv, Hq / Hkv, D
    Strided query, output; // float
    CachedRows key, value;
    Strided mask; // along batch, row, query head, key; stride 0 where broadcast
    bool mask_is_bool;
    std::int64_t mask_keys; // kv; without a mask -1
    Positions start;
    bool causal;
    float scale;
};

// The keys [0, result) that rows before `row_end` can see, as far as lengths and causality say.
static inline std::int64_t key_limit(const Attention& a, std::int64_t b, std::int64_t row_end) {
    const std::int64_t start = position(a.start, b);
    const std::int64_t valid = a.mask.data != nullptr ? a.mask_keys : start + a.rows;
    return a.causal ? smaller(valid, start + row_end) : valid;
}

// Query rows [row_begin, row_end) of the groups of key/value heads [kv_head, kv_head + heads), and the keys [key_begin,
// key_end) they look at.
struct Tile {
    std::int64_t batch, kv_head, heads, row_begin, row_end, key_begin, key_end;
};

// Whether the heads of one position lie side by side, so that a block of positions is one stretch of memory.
static inline bool heads_together(const Attention& a, const CachedRows& rows) {
    return a.kv_heads > 1 && rows.cache.stride[2] == a.dim && rows.cache.stride[1] == a.kv_heads * a.dim;
}

// What the softmax over a part of the keys leaves, for rows = group x (row_end - row_begin), row r = row * group +
// head: maximum [rows], sum of exp(score - maximum) [rows], and the same sum of values [rows, width], width >= D.
struct Partial {
    float* maximum;
    float* sum;
    float* values;
};

// The fast paths of one instruction set. They need every innermost stride of query, output, caches and recent rows to
// be 1.
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

class Threads;

// The oracle: double precision, one row after the other, any strides.
void attend_reference(const Attention& attention, const Threads& threads);

// With the kernels of an instruction set, falling back on the reference where they do not apply.
void attend(const Attention& attention, const AttentionKernels* kernels, const Threads& threads);

} // namespace gr
