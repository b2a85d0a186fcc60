#include "widen.h"

#include "float16.h"
#include "graphrewrite/kernels.h"

namespace gr {
namespace {

template <typename Element, typename Convert>
void convert_all(const void* values, std::int64_t stride, std::int64_t count, float* floats, Convert convert) {
    const auto* source = static_cast<const Element*>(values);
    if (stride == 1) // a loop of its own, which becomes vector code
        for (std::int64_t k = 0; k < count; ++k)
            floats[k] = convert(source[k]);
    else
        for (std::int64_t k = 0; k < count; ++k)
            floats[k] = convert(source[k * stride]);
}

} // namespace

void widen(const void* values, std::int32_t dtype, std::int64_t stride, std::int64_t count, float* floats) {
    if (dtype == GR_FLOAT16)
        convert_all<std::uint16_t>(values, stride, count, floats, float16_to_float);
    else if (dtype == GR_BFLOAT16)
        convert_all<std::uint16_t>(values, stride, count, floats, bfloat16_to_float);
    else
        convert_all<float>(values, stride, count, floats, [](float value) { return value; });
}

} // namespace gr
