#pragma once

#include "../quantize.h"

namespace gr::avx2 {

extern const QuantizationKernels kQuantization;
extern const DequantizationKernels kDequantization;

} // namespace gr::avx2
