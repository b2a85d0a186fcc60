#pragma once

#include <cstdint>

namespace gr {

// Reads `count` elements of type float32, float16 or bfloat16 as floats, exactly. The stride is in elements.
void widen(const void* values, std::int32_t dtype, std::int64_t stride, std::int64_t count, float* floats);

} // namespace gr
