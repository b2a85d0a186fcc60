#pragma once

#include <optional>

#include "copy.h"
#include "scratch.h"
#include "tensor.h"

namespace gr {

// The elements of a tensor side by side: where they lie, or in scratch memory when its strides are others.
class Dense {
public:
    // Throws std::bad_alloc.
    explicit Dense(const Argument& argument);

    template <typename T> T* data() const { return static_cast<T*>(data_); }
    // Fills the memory from the tensor, or the tensor from the memory, where they are two.
    void load(const Threads& threads) const;
    void store(const Threads& threads) const;

private:
    const GrTensor& tensor_;
    std::optional<Scratch> copy_;
    void* data_;
    CopyShape shape_; // from the tensor's strides to dense ones
};

} // namespace gr
