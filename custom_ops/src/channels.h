// The stand-alone operators that quantize with given parameters: per channel, or per token, where every row is a
// channel.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tensor.h"
#include "threads.h"

namespace gr {

// The tensors of such an operator, checked to fit each other. The elements are [outer, count, inner], with the channels
// in the middle.
struct ChannelOperands {
    Argument elements, scales;
    std::optional<Argument> zero_points; // absent: 0
    Argument output;
    std::int64_t outer = 0, count = 0, inner = 0;
    std::int64_t total() const { return outer * count * inner; }

    // Scales and zero points [n] along `axis`, which counts from the end where it is negative.
    static ChannelOperands per_channel(const char* op, const char* name, const GrTensor* elements,
                                       const GrTensor* scales, const GrTensor* zero_points, const char* output_name,
                                       const GrTensor* output, std::int64_t axis);
    // Scales and zero points [..., 1].
    static ChannelOperands per_token(const char* op, const char* name, const GrTensor* elements, const GrTensor* scales,
                                     const GrTensor* zero_points, const char* output_name, const GrTensor* output);

private:
    ChannelOperands(const char* op, const char* name, const GrTensor* elements_tensor, const GrTensor* scales_tensor,
                    const GrTensor* zero_points_tensor, const char* output_name, const GrTensor* output_tensor);
    void check_parameters(const std::vector<std::int64_t>& shape, const std::string& reason) const;
};

// Codes int8 of floats. The zero point joins after rounding where `round_first`.
void quantize_channels(const ChannelOperands& operands, std::int64_t quant_min, std::int64_t quant_max,
                       bool round_first, const Threads& threads);

// float32 values of codes int8 or uint8.
void dequantize_channels(const ChannelOperands& operands, const Threads& threads);

} // namespace gr
