// Checking of attention's arguments.
#pragma once

#include "attention.h"
#include "tensor.h"
#include "threads.h"

namespace gr {

struct AttentionArguments {
    const GrTensor *query, *key_cache, *value_cache, *start_pos;
    const GrTensor *key_scales, *key_zero_points, *value_scales, *value_zero_points; // may be NULL
    const GrTensor *recent_key, *recent_value, *attn_mask;                           // may be NULL
    const GrTensor* output;
    bool causal;
    const float* scale; // NULL: 1/sqrt(D)
    Layout layout;
};

// Throws unless `scale` is finite.
void check_scale(const char* op, float scale);

// Throws InvalidArgument unless every argument fits every other.
Attention check_attention(const char* op, const AttentionArguments& arguments);

// SdpaWithKvCache: checks everything, then writes both caches and attends to them.
void sdpa_with_kv_cache(const char* op, const AttentionArguments& arguments, const GrTensor* key, const GrTensor* value,
                        const GrTensor* new_key_cache, const GrTensor* new_value_cache, const Threads& threads);

} // namespace gr
