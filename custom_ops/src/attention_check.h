// Checking of attention's arguments.
#pragma once

#include "attention.h"
#include "tensor.h"

namespace gr {

struct AttentionArguments {
    const GrTensor *query, *key_cache, *value_cache, *start_pos;
    const GrTensor *key_scales, *key_zero_points, *value_scales, *value_zero_points; // may be NULL
    const GrTensor *recent_key, *recent_value, *attn_mask, *sinks;                   // may be NULL
    const GrTensor* output;
    bool causal;
    const float* scale; // NULL: 1/sqrt(D)
    float softcap;      // 0: none
    std::int64_t window, sink_tokens;
    Layout layout;
    // Of an int8 query, which there is when `query_scales` is not NULL.
    const GrTensor *query_scales = nullptr, *query_zero_points = nullptr;
};

// Throws InvalidArgument unless every argument fits every other.
Attention check_attention(const char* op, const AttentionArguments& arguments);

} // namespace gr
