// Checking and running of the operators that write a cache.
#pragma once

#include "tensor.h"
#include "threads.h"

namespace gr {

// Circular: a position means the slot that it is modulo the capacity.
enum class CacheMode { Linear, Circular };

// New rows, the cache they go to, and the new cache, checked to fit each other. The names are those the messages use;
// capacity and the other sizes are the cache's own.
struct CacheOperands {
    CacheOperands(const char* op, const char* value_name, const GrTensor* value_tensor, const char* cache_name,
                  const GrTensor* cache_tensor, const char* output_name, const GrTensor* output_tensor, Layout layout);

    View value, cache, output;
};

// UpdateCache: rows go to consecutive positions.
class CacheUpdate {
public:
    // Checks everything.
    CacheUpdate(const char* op, const char* value_name, const GrTensor* value, const char* cache_name,
                const GrTensor* cache, const char* output_name, const GrTensor* output, const GrTensor* start_pos,
                Layout layout, CacheMode mode = CacheMode::Linear);

    const View& value() const { return operands_.value; }
    const View& cache() const { return operands_.cache; }
    const View& output() const { return operands_.output; }

    void run(const Threads& threads) const;

private:
    CacheOperands operands_;
    Positions start_;
    CacheMode mode_;
};

// UpdateCacheWithIndices: each row goes to a slot of its own.
class IndexedCacheUpdate {
public:
    // Checks everything.
    IndexedCacheUpdate(const char* op, const GrTensor* value, const GrTensor* cache, const GrTensor* indices,
                       const GrTensor* new_cache, Layout layout);

    void run(const Threads& threads) const;

private:
    std::int64_t slot(std::int64_t batch, std::int64_t row) const {
        return indices_[batch * index_stride_[0] + row * index_stride_[1]];
    }

    CacheOperands operands_;
    const std::int64_t* indices_;
    std::int64_t index_stride_[2];
};

// start_pos, checked to leave room for the new rows.
Positions check_start(const char* op, const GrTensor* start_pos, std::int64_t batch, std::int64_t new_rows,
                      std::int64_t capacity, CacheMode mode);

// Of more rows than a ring has slots, the first ones would be overwritten: how many are left out.
std::int64_t skipped_rows(std::int64_t new_rows, std::int64_t capacity);

// Throws unless `output` may replace `cache` (or the scales or zero points of one).
void check_pair(const View& cache, const View& output);

// Makes `output` equal to `cache`, unless they are one buffer.
void copy_cache(const View& cache, const View& output, const Threads& threads);

} // namespace gr
