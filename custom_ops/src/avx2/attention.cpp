// Attention for AVX2 and FMA. Compiled for them, and so entered only where the processor has them.
#include "../isa.h"
#include "../simd/few.h"
#include "../simd/many.h"
#include "pack.h"
#include "quantize.h"
#include "vector.h"

namespace gr {
namespace {

struct Vector : Avx2 {
    static constexpr std::int64_t kPackedKeys = avx2::kPackedKeys;
    template <typename Element>
    static void pack_keys(const Element* row, std::int64_t stride, std::int64_t keys, const float* scales,
                          const std::int32_t* zero_points, std::int64_t dim, float* out, std::int64_t pitch) {
        avx2::pack_keys(row, stride, keys, scales, zero_points, dim, out, pitch);
    }
};

std::int64_t width(std::int64_t dim) {
    return round_up(dim, 2 * Vector::kWidth);
}

constexpr AttentionKernels kAttention{simd::kFewRows,
                                      width,
                                      simd::FewRows<Vector>::scratch,
                                      simd::ManyRows<Vector>::scratch,
                                      simd::FewRows<Vector>::run,
                                      simd::ManyRows<Vector>::run,
                                      simd::finish<Vector>};

} // namespace

const Kernels kAvx2Kernels{"avx2", &kAttention, avx2::quantize_asymmetric, avx2::quantize_symmetric};

} // namespace gr
