// Running attention, with the kernels of an instruction set or with the reference.
#pragma once

#include "attention.h"
#include "scratch.h"
#include "threads.h"

namespace gr {

// How the work is cut: into tiles of query rows, groups of heads, and parts of the keys.
struct AttentionPlan {
    bool few;
    std::int64_t heads;            // key/value heads of a job
    std::int64_t tile_rows, tiles; // query rows a tile, tiles
    std::int64_t jobs;             // tiles x batch x groups of heads, each for every part
    std::int64_t part_keys, parts; // keys a part, parts
    std::int64_t rows;             // group x tile_rows
    std::int64_t width;            // floats from one row of a partial's values to the next
    std::int64_t partial, working; // floats of a partial, and of a worker
};

// Attention together with all the memory that it takes, so that nothing can fail once it runs.
class PreparedAttention {
public:
    // Without kernels, and where they do not apply: the reference. Throws std::bad_alloc.
    PreparedAttention(const Attention& attention, const AttentionKernels* kernels, const Threads& threads);

    void run() const;

private:
    std::size_t bytes() const;
    void run_part(std::int64_t job, std::int64_t part, std::int64_t worker) const;
    void finish(std::int64_t job, std::int64_t place, std::int64_t head) const;
    Partial partial(std::int64_t place, std::int64_t head, std::int64_t part) const;
    std::int64_t partials() const;
    std::int64_t workers() const { return static_cast<std::int64_t>(threads_.workers()); }

    Attention attention_;
    const AttentionKernels* kernels_; // NULL: the reference
    const Threads alone_{nullptr};
    const AttentionPlan plan_;
    const Threads& threads_;
    const Scratch scratch_;
    float* memory_; // of the scratch memory, what is behind the scales
};

// The oracle: double precision, one row after the other, any strides. `scratch` has `reference_scratch` doubles for
// each worker.
void attend_reference(const Attention& attention, const Threads& threads, double* scratch);
std::int64_t reference_scratch(const Attention& attention);

} // namespace gr
