// UpdateQuantizedCache: quantizes new rows and writes codes, scales and zero points in one pass.
#pragma once

#include "update.h"

namespace gr {

enum class Scheme { Asymmetric, Symmetric, Static };

struct QuantizedUpdate {
    const GrTensor *value, *codes, *scales, *start_pos, *zero_points;
    const GrTensor *new_codes, *new_scales, *new_zero_points;
    Layout layout;
    CacheMode mode;
    Scheme scheme;
    bool round_first; // the zero point joins after rounding
};

// Checks everything, then runs.
void update_quantized_cache(const char* op, const QuantizedUpdate& update, const Threads& threads);

} // namespace gr
