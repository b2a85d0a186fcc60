// Attention for AVX-512 (F, BW, VL, DQ). Compiled for it, and so entered only where the processor has it.
#include "../avx2/pack.h"
#include "../avx2/quantize.h"
#include "../isa.h"
#include "../simd/kernels.h"
#include "dequantize.h"
#include "vector.h"

namespace gr {
namespace {

struct Vector : Avx512, avx2::Pack {};

} // namespace

const Kernels kAvx512Kernels{"avx512", &simd::kAttention<Vector>, &avx2::kQuantization, &avx512::kDequantization};

} // namespace gr
