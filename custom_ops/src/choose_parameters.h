// ChooseQParamsPerToken: scales and zero points of rows.
#pragma once

#include "tensor.h"
#include "threads.h"

namespace gr {

// input [..., D] of float32, float16 or bfloat16; scales float64 [..., 1]; zero_points int64 [..., 1].
void choose_parameters_per_token(const char* op, const GrTensor* input, const GrTensor* scales,
                                 const GrTensor* zero_points, bool symmetric, const Threads& threads);

} // namespace gr
