// Cuts attention into tiles of query rows and parts of the keys, runs them on the threads, and merges the parts. The
// cut depends on sizes alone, so the result does not depend on how many threads there are or which one takes what.
#include "attention.h"

#include <algorithm>
#include <limits>

#include "scratch.h"
#include "threads.h"

namespace gr {
namespace {

constexpr std::int64_t kManyRows = 192;          // rows (group x query rows) that share a block of unpacked keys
constexpr std::int64_t kFewJobs = 32;            // jobs to aim at when reading the cache is what takes the time
constexpr std::int64_t kManyJobs = 16;           // the same when arithmetic is
constexpr std::int64_t kKeyStep = 64;            // parts of the keys are multiples of this
constexpr std::int64_t kFewKeys[] = {256, 1024}; // shortest and longest part
constexpr std::int64_t kManyKeys = 512;          // shortest part
constexpr std::int64_t kInline = 1 << 17;        // multiply-adds below which waking threads costs more than it saves

bool unit_rows(const CachedRows& rows) {
    return rows.cache.stride[3] == 1 && (rows.recent.data == nullptr || rows.recent.stride[3] == 1);
}

// Whether the innermost strides are those the fast paths need. With one element a row any stride will do, but is not
// worth a case of its own.
bool unit_strides(const Attention& a) {
    return a.query.stride[3] == 1 && a.output.stride[3] == 1 && unit_rows(a.key) && unit_rows(a.value);
}

struct Plan {
    bool few;
    std::int64_t heads;            // key/value heads of a job
    std::int64_t tile_rows, tiles; // query rows a tile, tiles
    std::int64_t part_keys, parts; // keys a part, parts
    std::int64_t width;            // floats from one row of a partial's values to the next
    std::int64_t jobs;             // tiles x batch x groups of heads, each for every part

    Plan(const Attention& a, const AttentionKernels& kernels) {
        std::int64_t keys = 1;
        for (std::int64_t b = 0; b < a.batch; ++b)
            keys = larger(keys, key_limit(a, b, a.rows));
        few = a.group * a.rows <= kernels.few_rows;
        heads = few && heads_together(a, a.key) && heads_together(a, a.value) ? a.kv_heads : 1;
        tiles = few ? 1 : divide_up(a.rows, larger(1, kManyRows / a.group));
        tile_rows = divide_up(a.rows, tiles);
        tiles = divide_up(a.rows, tile_rows);
        jobs = a.batch * (a.kv_heads / heads) * tiles;
        const std::int64_t wanted = few ? kFewJobs : kManyJobs;
        const std::int64_t share = round_up(divide_up(keys * jobs, wanted), kKeyStep);
        if (few)
            part_keys = smaller(larger(share, kFewKeys[0] / heads), kFewKeys[1]);
        else
            part_keys = jobs >= wanted ? keys : larger(share, kManyKeys);
        parts = divide_up(keys, part_keys);
        width = kernels.width(a.dim);
    }

    std::int64_t rows(const Attention& a) const { return a.group * tile_rows; }
    std::int64_t partial_floats(const Attention& a) const { return round_up(rows(a) * (width + 2), 16); }

    Partial partial(const Attention& a, float* memory) const {
        return {memory + rows(a) * width, memory + rows(a) * (width + 1), memory};
    }

    // The tile of job number `job` for the first of its heads and part number `part`. Later rows come first: with a
    // causal mask they see more keys, and long jobs are better not started last.
    Tile tile(const Attention& a, std::int64_t job, std::int64_t part) const {
        const std::int64_t groups = a.kv_heads / heads, b = job / groups % a.batch;
        const std::int64_t row_begin = (tiles - 1 - job / groups / a.batch) * tile_rows;
        const std::int64_t row_end = smaller(row_begin + tile_rows, a.rows);
        const std::int64_t limit = key_limit(a, b, row_end), key_begin = smaller(part * part_keys, limit);
        return {b, job % groups * heads, heads, row_begin, row_end, key_begin, smaller(key_begin + part_keys, limit)};
    }
};

void clear(const Attention& a, const Plan& plan, const Partial& partial) {
    std::fill_n(partial.values, plan.rows(a) * plan.width, 0.0f);
    std::fill_n(partial.maximum, plan.rows(a), -std::numeric_limits<float>::infinity());
    std::fill_n(partial.sum, plan.rows(a), 0.0f);
}

} // namespace

void attend(const Attention& a, const AttentionKernels* kernels, const Threads& threads) {
    if (a.batch == 0 || a.rows == 0 || a.query_heads == 0 || a.dim == 0)
        return;
    if (kernels == nullptr || !unit_strides(a))
        return attend_reference(a, threads);
    const Plan plan(a, *kernels);
    const std::int64_t floats = plan.partial_floats(a), rows = plan.rows(a);
    const std::int64_t working =
        round_up(plan.few ? kernels->few_scratch(a, rows, plan.heads) : kernels->many_scratch(a, rows), 16);
    const std::int64_t cost = a.query_heads * a.batch * a.rows * a.dim * smaller(plan.parts * plan.part_keys, kInline);
    const Threads alone(nullptr);
    const Threads& team = cost < kInline ? alone : threads;
    const std::int64_t workers = static_cast<std::int64_t>(team.workers());
    // One partial for each job, head and part; each worker's own when the keys are in one part.
    const std::int64_t partials = (plan.parts > 1 ? plan.jobs * plan.parts : workers) * plan.heads;
    const Scratch scratch(static_cast<std::size_t>(partials * floats + workers * working) * sizeof(float));
    float* memory = static_cast<float*>(scratch.data());
    // The partial of head `head` of a job and, `floats` further, those of the parts after the first.
    const auto partial_at = [&](std::int64_t job, std::int64_t head, std::int64_t part) {
        return plan.partial(a, memory + ((job * plan.heads + head) * plan.parts + part) * floats);
    };
    const auto finish = [&](Tile tile, std::int64_t job, std::int64_t head) {
        tile.kv_head += head;
        kernels->finish(a, tile, partial_at(job, head, 0), plan.parts, floats);
    };

    team.run(static_cast<std::size_t>(plan.jobs * plan.parts), [&](std::size_t index, std::size_t worker) {
        const std::int64_t n = static_cast<std::int64_t>(index), w = static_cast<std::int64_t>(worker);
        const std::int64_t job = n % plan.jobs, part = n / plan.jobs, place = plan.parts > 1 ? job : w;
        const Tile tile = plan.tile(a, job, part);
        for (std::int64_t head = 0; head < plan.heads; ++head)
            clear(a, plan, partial_at(place, head, part));
        float* scratch_memory = memory + partials * floats + w * working;
        if (plan.few)
            kernels->few(a, tile, partial_at(place, 0, part), plan.parts * floats, scratch_memory);
        else
            kernels->many(a, tile, partial_at(place, 0, part), scratch_memory);
        for (std::int64_t head = 0; plan.parts == 1 && head < plan.heads; ++head)
            finish(tile, place, head);
    });
    if (plan.parts > 1)
        team.run(static_cast<std::size_t>(plan.jobs * plan.heads), [&](std::size_t index, std::size_t) {
            const std::int64_t job = static_cast<std::int64_t>(index) / plan.heads;
            finish(plan.tile(a, job, 0), job, static_cast<std::int64_t>(index) % plan.heads);
        });
}

} // namespace gr
