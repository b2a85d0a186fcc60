// Cuts attention into tiles of query rows and parts of the keys, runs them on the threads, and merges the parts. The cut
// depends on sizes alone, so the result does not depend on how many threads there are or which one takes what.
#include "attention.h"

#include "scratch.h"
#include "threads.h"

namespace gr {
namespace {

constexpr std::int64_t kManyRows = 192;       // rows (group x query rows) that share a block of unpacked keys
constexpr std::int64_t kFewJobs = 32;         // jobs to aim at when reading the cache is what takes the time
constexpr std::int64_t kManyJobs = 16;        // the same when arithmetic is
constexpr std::int64_t kKeyStep = 64;         // parts of the keys are multiples of this
constexpr std::int64_t kFewKeys[] = {256, 1024}; // shortest and longest part
constexpr std::int64_t kManyKeys = 512;       // shortest part
constexpr std::int64_t kInline = 1 << 17;     // multiply-adds below which waking threads costs more than it saves

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
    std::int64_t tile_rows, tiles; // query rows a tile, tiles
    std::int64_t part_keys, parts; // keys a part, parts
    std::int64_t width;            // floats from one row of a partial's values to the next

    Plan(const Attention& a, const AttentionKernels& kernels) {
        std::int64_t keys = 1;
        for (std::int64_t b = 0; b < a.batch; ++b)
            keys = larger(keys, key_limit(a, b, a.rows));
        few = a.group * a.rows <= kernels.few_rows;
        tiles = few ? 1 : divide_up(a.rows, larger(1, kManyRows / a.group));
        tile_rows = divide_up(a.rows, tiles);
        tiles = divide_up(a.rows, tile_rows);
        const std::int64_t jobs = a.batch * a.kv_heads * tiles, wanted = few ? kFewJobs : kManyJobs;
        const std::int64_t share = round_up(divide_up(keys * jobs, wanted), kKeyStep);
        if (few)
            part_keys = smaller(larger(share, kFewKeys[0]), kFewKeys[1]);
        else
            part_keys = jobs >= wanted ? keys : larger(share, kManyKeys);
        parts = divide_up(keys, part_keys);
        width = kernels.width(a.dim);
    }

    std::int64_t partial_floats(const Attention& a) const { return round_up(a.group * tile_rows * (width + 2), 16); }

    Partial partial(const Attention& a, float* memory) const {
        const std::int64_t rows = a.group * tile_rows;
        return {memory + rows * width, memory + rows * (width + 1), memory};
    }

    // Job number `job` of `parts` x `tiles` x batch x heads. Later tiles come first: with a causal mask they see more
    // keys, and long jobs are better not started last.
    Tile tile(const Attention& a, std::int64_t job, std::int64_t part) const {
        const std::int64_t kv_head = job % a.kv_heads, b = job / a.kv_heads % a.batch;
        const std::int64_t row_begin = (tiles - 1 - job / a.kv_heads / a.batch) * tile_rows;
        const std::int64_t row_end = smaller(row_begin + tile_rows, a.rows);
        const std::int64_t limit = key_limit(a, b, row_end), key_begin = smaller(part * part_keys, limit);
        return {b, kv_head, row_begin, row_end, key_begin, smaller(key_begin + part_keys, limit)};
    }
};

} // namespace

void attend(const Attention& a, const AttentionKernels* kernels, const Threads& threads) {
    if (a.batch == 0 || a.rows == 0 || a.query_heads == 0 || a.dim == 0)
        return;
    if (kernels == nullptr || !unit_strides(a))
        return attend_reference(a, threads);
    const Plan plan(a, *kernels);
    const std::int64_t jobs = plan.tiles * a.batch * a.kv_heads, floats = plan.partial_floats(a);
    const std::int64_t rows = a.group * plan.tile_rows;
    const std::int64_t working = round_up(
        plan.few ? kernels->few_scratch(a, rows, plan.part_keys) : kernels->many_scratch(a, rows), 16);
    const std::int64_t cost = a.query_heads * a.batch * a.rows * a.dim * smaller(plan.parts * plan.part_keys, kInline);
    const Threads alone(nullptr);
    const Threads& team = cost < kInline ? alone : threads;
    const std::int64_t workers = static_cast<std::int64_t>(team.workers());
    // One partial for each job and part; each worker's own when no job has parts.
    const std::int64_t partials = plan.parts > 1 ? jobs * plan.parts : workers;
    const Scratch scratch(static_cast<std::size_t>(partials * floats + workers * working) * sizeof(float));
    float* memory = static_cast<float*>(scratch.data());
    const auto attend_tile = plan.few ? kernels->few : kernels->many;

    team.run(static_cast<std::size_t>(jobs * plan.parts), [&](std::size_t index, std::size_t worker) {
        const std::int64_t n = static_cast<std::int64_t>(index), w = static_cast<std::int64_t>(worker);
        const std::int64_t job = n % jobs, part = n / jobs;
        const Tile tile = plan.tile(a, job, part);
        const std::int64_t place = plan.parts > 1 ? job * plan.parts + part : w;
        const Partial partial = plan.partial(a, memory + place * floats);
        attend_tile(a, tile, partial, memory + partials * floats + w * working);
        if (plan.parts == 1)
            kernels->finish(a, tile, partial, 1, floats);
    });
    if (plan.parts == 1)
        return;
    team.run(static_cast<std::size_t>(jobs), [&](std::size_t index, std::size_t) {
        const std::int64_t job = static_cast<std::int64_t>(index);
        const Partial first = plan.partial(a, memory + job * plan.parts * floats);
        kernels->finish(a, plan.tile(a, job, 0), first, plan.parts, floats);
    });
}

} // namespace gr
