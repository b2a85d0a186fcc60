#pragma once

#include <cstdint>

namespace gr::avx2 {

void quantize_asymmetric(const float* row, std::int64_t dim, std::int8_t* codes, float* scale, std::int8_t* zero_point);
void quantize_symmetric(const float* row, std::int64_t dim, std::int8_t* codes, float* scale, std::int8_t* zero_point);

} // namespace gr::avx2
