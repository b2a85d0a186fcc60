// Which instruction set the kernels use, and the kernels that each one brings.
#pragma once

#include <cstdint>

#include "attention.h"

namespace gr {

// Quantizes one row of `dim` floats, all contiguous. Bit for bit what torch's quantized_decomposed operators compute.
using QuantizeRow = void (*)(const float* row, std::int64_t dim, std::int8_t* codes, float* scale,
                             std::int8_t* zero_point);

// The kernels of one instruction set.
struct Kernels {
    const char* name;
    const AttentionKernels* attention; // NULL: the reference
    QuantizeRow quantize_asymmetric;
    QuantizeRow quantize_symmetric;
};

// The kernels in use. Throws InvalidArgument, the message led by `op`, when GRAPHREWRITE_ISA cannot be followed.
const Kernels& active_kernels(const char* op);

// NULL name: as GRAPHREWRITE_ISA says, else the best the processor has. Throws InvalidArgument and changes nothing.
void select_isa(const char* op, const char* name);

extern const Kernels kScalarKernels;
#if defined(GRAPHREWRITE_HAVE_AVX2)
extern const Kernels kAvx2Kernels;
#endif
#if defined(GRAPHREWRITE_HAVE_AVX512)
extern const Kernels kAvx512Kernels;
#endif

} // namespace gr
