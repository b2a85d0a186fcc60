#pragma once

#include "../quantize.h"

namespace gr::avx512 {

extern const DequantizationKernels kDequantization;

} // namespace gr::avx512
