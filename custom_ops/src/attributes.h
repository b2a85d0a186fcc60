// Attributes that several operators have.
#pragma once

#include <cmath>

#include "op.h"
#include "tensor.h"

namespace gr {

struct LayoutAttribute : Attribute<std::string> {
    static constexpr const char* name = "layout";
    static constexpr const char* doc = "Order of the dimensions of every tensor of rank 4: \"BSNH\" (batch, sequence, "
                                       "head, element) or \"BNSH\" (batch, head, sequence, element).";
    LayoutAttribute() { value = "BSNH"; }
    void check(const char* op) const { parse_layout(op, value.c_str()); }
    Layout layout() const { return value == "BSNH" ? Layout::BSNH : Layout::BNSH; }
};

// Throws unless `value` is among those that `known` lists.
inline void require_known(const char* op, const char* name, const std::string& value,
                          std::initializer_list<const char*> known) {
    std::string names;
    for (const char* candidate : known) {
        if (value == candidate)
            return;
        names += (names.empty() ? "\"" : ", \"") + std::string(candidate) + "\"";
    }
    fail(op, name, " \"", value, "\" is unknown, expected one of ", names);
}

struct ModeAttribute : Attribute<std::string> {
    static constexpr const char* name = "write_mode"; // "mode" is a keyword of torch's own when it functionalizes
    static constexpr const char* doc =
        "\"linear\": row i goes to slot start_pos + i, which lies within the cache. \"circular\": it goes to that slot "
        "modulo the capacity; of more rows than slots the last ones stay.";
    ModeAttribute() { value = "linear"; }
    void check(const char* op) const { require_known(op, name, value, {"linear", "circular"}); }
    bool circular() const { return value == "circular"; }
};

struct RoundingAttribute : Attribute<std::string> {
    static constexpr const char* name = "rounding";
    static constexpr const char* doc = "Whether the zero point joins before the sum is rounded (\"after_zero_point\": "
                                       "round(x / scale + zero_point)) or afterwards (\"before_zero_point\": "
                                       "round(x / scale) + zero_point). They differ on ties.";
    void check(const char* op) const { require_known(op, name, value, {"after_zero_point", "before_zero_point"}); }
    bool after_zero_point() const { return value == "after_zero_point"; }
};

struct CausalAttribute : Attribute<bool> {
    static constexpr const char* name = "is_causal";
    static constexpr const char* doc = "1: row i sees no key behind position start_pos + i.";
};

struct ScaleAttribute : Attribute<std::optional<float>> {
    static constexpr const char* name = "scale";
    static constexpr const char* doc = "Factor of the scores; without it 1 / sqrt(D).";
    void check(const char* op) const {
        if (value && !std::isfinite(*value))
            fail(op, name, " ", std::to_string(*value), " is not finite");
    }
    const float* pointer() const { return value ? &*value : nullptr; }
};

struct SoftcapAttribute : Attribute<float> {
    static constexpr const char* name = "softcap";
    static constexpr const char* doc =
        "Where positive, scores become softcap * tanh(score / softcap) before the mask is applied. 0: they stay.";
    void check(const char* op) const {
        if (!(value >= 0) || !std::isfinite(value))
            fail(op, name, " ", std::to_string(value), " is not zero or a positive number");
    }
};

struct WindowAttribute : Attribute<std::int64_t> {
    static constexpr const char* name = "window";
    static constexpr const char* doc = "Where positive, row i sees only keys behind position start_pos + i - window, "
                                       "so the last `window` ones when causal. 0: no limit.";
    void check(const char* op) const {
        if (value < 0)
            fail(op, name, " ", value, " is negative");
    }
};

struct SinkTokensAttribute : Attribute<std::int64_t> {
    static constexpr const char* name = "sink_tokens";
    static constexpr const char* doc = "The first keys, as many as this, stay visible whatever the window.";
    void check(const char* op) const {
        if (value < 0)
            fail(op, name, " ", value, " is negative");
    }
};

} // namespace gr
