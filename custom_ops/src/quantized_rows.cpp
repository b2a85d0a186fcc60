#include "quantized_rows.h"

#include "widen.h"

namespace gr {
namespace {

constexpr std::int64_t kJobElements = 16384; // elements a job quantizes, a few microseconds' worth

} // namespace

std::size_t CodeRows::scratch_bytes(const Threads& threads) const {
    return threads.workers() * static_cast<std::size_t>(buffer_bytes());
}

void CodeRows::run_row(const QuantizationKernels& kernels, const RowQuantizer& quantizer, const Buffers& buffers,
                       std::int64_t b, std::int64_t s, std::int64_t h) const {
    const std::int64_t slot = (position(start, b) % capacity + s % capacity) % capacity;
    const char* source = static_cast<const char*>(value.data) +
                         (b * value.stride[0] + s * value.stride[1] + h * value.stride[2]) * dtype_bytes(value_dtype);
    const bool readable = value_dtype == GR_FLOAT && value.stride[3] == 1;
    if (!readable)
        widen(source, value_dtype, value.stride[3], dim, buffers.floats);

    auto* target = at<std::int8_t>(codes, b, slot, h);
    const bool dense = codes.stride[3] == 1;
    std::int8_t* const bytes = dense ? target : buffers.packed; // what is stored, side by side
    std::int8_t* const row_codes = packed ? buffers.codes : bytes;
    quantizer.quantize(readable ? reinterpret_cast<const float*>(source) : buffers.floats, b, slot, h, row_codes);
    if (packed)
        kernels.pack(row_codes, dim, offset, reinterpret_cast<std::uint8_t*>(bytes));
    for (std::int64_t k = 0; !dense && k < (packed ? dim / 2 : dim); ++k)
        target[k * codes.stride[3]] = bytes[k];
}

void CodeRows::run(const QuantizationKernels& kernels, const RowQuantizer& quantizer, const Threads& threads,
                   const Scratch& scratch) const {
    const std::int64_t skipped = skipped_rows(rows, capacity), kept = rows - skipped, total = batch * kept * heads;
    const std::int64_t group = larger(1, kJobElements / larger(1, dim));
    threads.run(static_cast<std::size_t>(divide_up(total, group)), [&](std::size_t index, std::size_t worker) {
        auto* const memory = static_cast<char*>(scratch.data()) + static_cast<std::int64_t>(worker) * buffer_bytes();
        const Buffers buffers{reinterpret_cast<float*>(memory), reinterpret_cast<std::int8_t*>(memory + dim * 4),
                              reinterpret_cast<std::int8_t*>(memory + dim * 5)};
        const std::int64_t begin = static_cast<std::int64_t>(index) * group, end = smaller(begin + group, total);
        for (std::int64_t n = begin; n < end; ++n)
            run_row(kernels, quantizer, buffers, n / heads / kept, skipped + n / heads % kept, n % heads);
    });
}

} // namespace gr
