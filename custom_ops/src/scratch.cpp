#include "scratch.h"

#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace gr {
namespace {

constexpr std::align_val_t kAlignment{64};
// Buffers beyond this many (calls that ran at once) or this large are given back.
constexpr std::size_t kKeptBuffers = 8;
constexpr std::size_t kKeptBytes = std::size_t{64} << 20;

struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
};

void release(const Buffer& buffer) {
    ::operator delete(buffer.data, kAlignment);
}

class Pool {
public:
    Pool() { buffers_.reserve(kKeptBuffers); }
    ~Pool() {
        for (const Buffer& buffer : buffers_)
            release(buffer);
    }

    Buffer take(std::size_t bytes) {
        Buffer largest;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (std::size_t i = 0; i < buffers_.size(); ++i)
                if (buffers_[i].bytes > buffers_.back().bytes)
                    std::swap(buffers_[i], buffers_.back());
            if (!buffers_.empty()) {
                largest = buffers_.back();
                buffers_.pop_back();
            }
        }
        if (largest.bytes >= bytes)
            return largest;
        release(largest);
        return {::operator new(bytes, kAlignment), bytes};
    }

    void give(const Buffer& buffer) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (buffer.bytes <= kKeptBytes && buffers_.size() < kKeptBuffers) {
                buffers_.push_back(buffer);
                return;
            }
        }
        release(buffer);
    }

private:
    std::mutex mutex_;
    std::vector<Buffer> buffers_;
};

Pool& pool() {
    static Pool instance;
    return instance;
}

} // namespace

Scratch::Scratch(std::size_t bytes) {
    const Buffer buffer = pool().take(bytes);
    data_ = buffer.data;
    bytes_ = buffer.bytes;
}

Scratch::~Scratch() {
    pool().give({data_, bytes_});
}

} // namespace gr
