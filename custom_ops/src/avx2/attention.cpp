// Attention for AVX2 and FMA. Compiled for them, and so entered only where the processor has them.
#include "../isa.h"
#include "../simd/kernels.h"
#include "pack.h"
#include "quantize.h"
#include "vector.h"

namespace gr {
namespace {

struct Vector : Avx2, avx2::Pack {};

} // namespace

const Kernels kAvx2Kernels{"avx2", &simd::kAttention<Vector>, &avx2::kQuantization, &avx2::kDequantization};

} // namespace gr
