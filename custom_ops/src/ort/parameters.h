// The parameter types that a kernel's C++ signature is made of. From them onnxruntime learns an operator's inputs,
// outputs and in-place pairs; see op.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "graphrewrite/kernels.h"

namespace gr::ort {

struct Float16 {};
struct BFloat16 {};

template <typename T> constexpr std::int32_t kDtype = 0;
template <> inline constexpr std::int32_t kDtype<float> = GR_FLOAT;
template <> inline constexpr std::int32_t kDtype<std::uint8_t> = GR_UINT8;
template <> inline constexpr std::int32_t kDtype<std::int8_t> = GR_INT8;
template <> inline constexpr std::int32_t kDtype<std::int32_t> = GR_INT32;
template <> inline constexpr std::int32_t kDtype<std::int64_t> = GR_INT64;
template <> inline constexpr std::int32_t kDtype<bool> = GR_BOOL;
template <> inline constexpr std::int32_t kDtype<Float16> = GR_FLOAT16;
template <> inline constexpr std::int32_t kDtype<double> = GR_DOUBLE;
template <> inline constexpr std::int32_t kDtype<BFloat16> = GR_BFLOAT16;

enum class Role { Input, Output, Attribute, Call };

// What a parameter type says of itself.
struct Traits {
    Role role;
    std::int32_t dtype = 0;
    bool optional = false;
    int like = -1;         // an output: the input whose shape it has
    bool in_place = false; // an output: may share the buffer of input `like`
};

struct TensorParameter {
    const GrTensor* tensor; // NULL: absent
    operator const GrTensor*() const { return tensor; }
};

template <typename T> struct Input : TensorParameter {
    static constexpr Traits traits{Role::Input, kDtype<T>};
};

template <typename T> struct OptionalInput : TensorParameter {
    static constexpr Traits traits{Role::Input, kDtype<T>, true};
};

// A new tensor with the shape of input `Like`.
template <typename T, int Like> struct Output : TensorParameter {
    static constexpr Traits traits{Role::Output, kDtype<T>, false, Like};
};

// The new state of input `Of`, in the same buffer where the runtime allows.
template <typename T, int Of> struct InPlace : TensorParameter {
    static constexpr Traits traits{Role::Output, kDtype<T>, false, Of, true};
};

template <typename T, int Of> struct OptionalInPlace : TensorParameter {
    static constexpr Traits traits{Role::Output, kDtype<T>, true, Of, true};
};

// An attribute type has a `name`, a `value`, its default in place, and may have `check(op)`, which throws.
struct AttributeParameter {
    static constexpr Traits traits{Role::Attribute};
};

// What every kernel gets besides: the session's threads and a place for a message.
struct Call {
    static constexpr Traits traits{Role::Call};
    const GrThreads* threads;
    char* error;
    std::size_t error_size;
};

} // namespace gr::ort
