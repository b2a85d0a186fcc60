// Attributes that only the operators for quantization have.
#pragma once

#include "attributes.h"

namespace gr {

struct AxisAttribute : Attribute<std::int64_t> {
    static constexpr const char* name = "axis";
    static constexpr const char* doc = "The dimension of the channels; a negative one counts from the end.";
    AxisAttribute() { value = -1; }
};

struct QuantMinAttribute : Attribute<std::int64_t> {
    static constexpr const char* name = "quant_min";
    static constexpr const char* doc = "The least code, -128 or more.";
    QuantMinAttribute() { value = -128; }
};

struct QuantMaxAttribute : Attribute<std::int64_t> {
    static constexpr const char* name = "quant_max";
    static constexpr const char* doc = "The largest code, 127 or less and not below quant_min.";
    QuantMaxAttribute() { value = 127; }
};

struct AfterZeroPoint : RoundingAttribute {
    AfterZeroPoint() { value = "after_zero_point"; }
};

struct BeforeZeroPoint : RoundingAttribute {
    BeforeZeroPoint() { value = "before_zero_point"; }
};

} // namespace gr
