// Checking and running of the operators that write a cache.
#pragma once

#include "tensor.h"
#include "threads.h"

namespace gr {

// New rows, the cache they go to, and the new cache.
class CacheUpdate {
public:
    // Checks everything. The names are those the messages use; capacity and the other sizes are the cache's own.
    CacheUpdate(const char* op, const char* value_name, const GrTensor* value, const char* cache_name,
                const GrTensor* cache, const char* output_name, const GrTensor* output, const GrTensor* start_pos,
                Layout layout);

    const View& value() const { return value_; }
    const View& cache() const { return cache_; }
    const View& output() const { return output_; }

    void run(const Threads& threads) const;

private:
    View value_, cache_, output_;
    Positions start_;
};

// Throws unless `output` may replace `cache` (or the scales or zero points of one).
void check_pair(const View& cache, const View& output);

// Makes `output` equal to `cache`, unless they are one buffer.
void copy_cache(const View& cache, const View& output, const Threads& threads);

// Throws unless `scheme` (NULL: "asymmetric") is known.
bool is_symmetric(const char* op, const char* scheme);

void update_quantized_cache(const GrTensor* value, const GrTensor* codes, const GrTensor* scales,
                            const GrTensor* start_pos, const GrTensor* zero_points, const GrTensor* new_codes,
                            const GrTensor* new_scales, const GrTensor* new_zero_points, const char* scheme,
                            const char* layout, const Threads& threads);

} // namespace gr
