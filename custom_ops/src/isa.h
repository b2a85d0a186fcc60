// Which instruction set the kernels use, and the kernels that each one brings.
#pragma once

#include "attention.h"
#include "quantize.h"

namespace gr {

// The kernels of one instruction set.
struct Kernels {
    const char* name;
    const AttentionKernels* attention; // NULL: the reference
    const QuantizationKernels* quantization;
    const DequantizationKernels* dequantization;
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
