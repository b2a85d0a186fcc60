// The rows that an update of a cache of codes quantizes, whatever their types, strides and packing.
#pragma once

#include "quantize.h"
#include "scratch.h"
#include "update.h"

namespace gr {

class RowQuantizer {
public:
    virtual ~RowQuantizer() = default;
    // `row` belongs to sequence b and head h and goes to `slot`. Writes its codes, and its scales and zero points where
    // they belong. Called from several threads, for different rows.
    virtual void quantize(const float* row, std::int64_t b, std::int64_t slot, std::int64_t h,
                          std::int8_t* codes) const = 0;
};

struct CodeRows {
    Strided value, codes;
    std::int32_t value_dtype;
    bool packed;        // int4, two codes a byte
    std::int8_t offset; // is added to codes that are packed
    Positions start;
    std::int64_t batch, rows, heads, dim, capacity;

    std::size_t scratch_bytes(const Threads& threads) const;
    // Quantizes and stores all rows that stay in the cache.
    void run(const QuantizationKernels& kernels, const RowQuantizer& quantizer, const Threads& threads,
             const Scratch& scratch) const;

private:
    // A row as floats, its codes, and these packed.
    struct Buffers {
        float* floats;
        std::int8_t *codes, *packed;
    };
    std::int64_t buffer_bytes() const { return round_up(dim * 6, 64); }
    void run_row(const QuantizationKernels& kernels, const RowQuantizer& quantizer, const Buffers& buffers,
                 std::int64_t b, std::int64_t s, std::int64_t h) const;
};

} // namespace gr
