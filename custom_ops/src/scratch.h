// Scratch memory that calls share one after the other, so a decoding step allocates nothing after the first.
#pragma once

#include <cstddef>

namespace gr {

// Memory for the time of one call, 64-byte aligned, not initialised. Throws std::bad_alloc.
class Scratch {
public:
    explicit Scratch(std::size_t bytes);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    void* data() const { return data_; }

private:
    void* data_;
    std::size_t bytes_;
};

} // namespace gr
