// Cuts attention into tiles of query rows and parts of the keys, runs them on the threads, and merges the parts. The
// cut depends on sizes alone, so the result does not depend on how many threads there are or which one takes what.
#include <algorithm>
#include <limits>

#include "attend.h"

namespace gr {
namespace {

constexpr std::int64_t kManyRows = 192;          // rows (group x query rows) that share a block of unpacked keys
constexpr std::int64_t kFewJobs = 32;            // jobs to aim at when reading the cache is what takes the time
constexpr std::int64_t kManyJobs = 16;           // the same when arithmetic is
constexpr std::int64_t kKeyStep = 64;            // parts of the keys are multiples of this
constexpr std::int64_t kFewKeys[] = {256, 1024}; // shortest and longest part
constexpr std::int64_t kManyKeys = 512;          // shortest part
constexpr std::int64_t kInline = 1 << 17;        // multiply-adds below which waking threads costs more than it saves

bool empty(const Attention& a) {
    return a.batch == 0 || a.rows == 0 || a.query_heads == 0 || a.dim == 0;
}

bool unit_rows(const CachedRows& rows) {
    return rows.cache.stride[3] == 1 && (rows.recent.data == nullptr || rows.recent.stride[3] == 1);
}

// Whether the innermost strides are those the fast paths need. With one element a row any stride will do, but is not
// worth a case of its own.
bool unit_strides(const Attention& a) {
    return a.query.stride[3] == 1 && a.output.stride[3] == 1 && unit_rows(a.key) && unit_rows(a.value);
}

// The keys that some of the rows [row_begin, row_end) see: [0, kept) and [begin, end).
struct KeyRange {
    std::int64_t kept, begin, end;
    std::int64_t count() const { return kept + end - begin; }
};

KeyRange key_range(const Attention& a, std::int64_t b, std::int64_t row_begin, std::int64_t row_end) {
    const std::int64_t end = key_limit(a, b, row_end);
    // Kept keys come apart even where the window joins them, for no tile may have both kinds.
    const std::int64_t kept = a.window == 0 ? 0 : smaller(a.sink_tokens, end);
    return {kept, smaller(larger(kept, window_begin(a, b, row_begin)), end), end};
}

std::int64_t most_keys(const Attention& a, std::int64_t tile_rows) {
    std::int64_t keys = 1;
    for (std::int64_t b = 0; b < a.batch; ++b)
        for (std::int64_t row = 0; row < a.rows; row += tile_rows)
            keys = larger(keys, key_range(a, b, row, smaller(row + tile_rows, a.rows)).count());
    return keys;
}

AttentionPlan make_plan(const Attention& a, const AttentionKernels& kernels) {
    AttentionPlan plan;
    plan.few = a.group * a.rows <= kernels.few_rows;
    plan.heads = plan.few && heads_together(a, a.key) && heads_together(a, a.value) ? a.kv_heads : 1;
    plan.tiles = plan.few ? 1 : divide_up(a.rows, larger(1, kManyRows / a.group));
    plan.tile_rows = divide_up(a.rows, plan.tiles);
    plan.tiles = divide_up(a.rows, plan.tile_rows);
    plan.jobs = a.batch * (a.kv_heads / plan.heads) * plan.tiles;
    const std::int64_t keys = most_keys(a, plan.tile_rows), wanted = plan.few ? kFewJobs : kManyJobs;
    const std::int64_t share = round_up(divide_up(keys * plan.jobs, wanted), kKeyStep);
    if (plan.few)
        plan.part_keys = smaller(larger(share, kFewKeys[0] / plan.heads), kFewKeys[1]);
    else
        plan.part_keys = plan.jobs >= wanted ? keys : larger(share, kManyKeys);
    plan.parts = divide_up(keys, plan.part_keys);
    plan.rows = a.group * plan.tile_rows;
    plan.width = kernels.width(a.dim);
    plan.partial = round_up(plan.rows * (plan.width + 2), 16);
    plan.working =
        round_up(plan.few ? kernels.few_scratch(a, plan.rows, plan.heads) : kernels.many_scratch(a, plan.rows), 16);
    return plan;
}

// The tile of job number `job` for the first of its heads, without keys. Later rows come first: with a causal mask they
// see more keys, and long jobs are better not started last.
Tile tile_of(const Attention& a, const AttentionPlan& plan, std::int64_t job) {
    const std::int64_t groups = a.kv_heads / plan.heads, b = job / groups % a.batch;
    const std::int64_t row_begin = (plan.tiles - 1 - job / groups / a.batch) * plan.tile_rows;
    return {b, job % groups * plan.heads, plan.heads, row_begin, smaller(row_begin + plan.tile_rows, a.rows), 0, 0};
}

// Whether the work is too little to share.
bool is_small(const Attention& a, const AttentionPlan& plan) {
    const std::int64_t keys = smaller(plan.parts * plan.part_keys, kInline);
    return a.query_heads * a.batch * a.rows * a.dim * keys < kInline;
}

// Floats that wide scales become.
std::int64_t narrowed(const Attention& a, const CachedRows& rows) {
    return rows.wide_scales ? round_up(a.kv_heads * (a.dim / rows.scales.group), 16) : 0;
}

// Rounds wide scales to floats, [heads][groups] from `target` on. Returns what is behind them.
float* narrow(const Attention& a, CachedRows& rows, float* target) {
    if (!rows.wide_scales)
        return target;
    const std::int64_t groups = a.dim / rows.scales.group, size = narrowed(a, rows);
    for (std::int64_t h = 0; h < a.kv_heads; ++h)
        for (std::int64_t n = 0; n < groups; ++n)
            target[h * groups + n] = static_cast<float>(*at<const double>(rows.scales.data, 0, 0, h, n));
    rows.scales.data = {target, {0, 0, groups, 1}};
    rows.wide_scales = false;
    return target + size;
}

} // namespace

PreparedAttention::PreparedAttention(const Attention& attention, const AttentionKernels* kernels,
                                     const Threads& threads)
    : attention_(attention), kernels_(!empty(attention) && unit_strides(attention) ? kernels : nullptr),
      plan_(kernels_ != nullptr ? make_plan(attention, *kernels_) : AttentionPlan{}),
      threads_(kernels_ != nullptr && is_small(attention, plan_) ? alone_ : threads), scratch_(bytes()) {
    memory_ = static_cast<float*>(scratch_.data());
    if (!empty(attention_))
        for (CachedRows* rows : {&attention_.key, &attention_.value})
            memory_ = narrow(attention_, *rows, memory_);
}

std::int64_t PreparedAttention::partials() const {
    // One for each job, head and part; each worker's own when the keys are in one part.
    return (plan_.parts > 1 ? plan_.jobs * plan_.parts : workers()) * plan_.heads;
}

std::size_t PreparedAttention::bytes() const {
    if (empty(attention_))
        return 0;
    const std::int64_t scales = narrowed(attention_, attention_.key) + narrowed(attention_, attention_.value);
    const std::int64_t doubles = kernels_ == nullptr ? workers() * reference_scratch(attention_) : 0;
    const std::int64_t floats =
        kernels_ != nullptr ? partials() * plan_.partial + workers() * plan_.working : 2 * doubles;
    return static_cast<std::size_t>(scales + floats) * sizeof(float);
}

// Number `part` of head `head` of the job at `place`; `plan_.partial` further lies the one after it.
Partial PreparedAttention::partial(std::int64_t place, std::int64_t head, std::int64_t part) const {
    float* values = memory_ + ((place * plan_.heads + head) * plan_.parts + part) * plan_.partial;
    return {values + plan_.rows * plan_.width, values + plan_.rows * (plan_.width + 1), values};
}

void PreparedAttention::finish(std::int64_t job, std::int64_t place, std::int64_t head) const {
    Tile tile = tile_of(attention_, plan_, job);
    tile.kv_head += head;
    kernels_->finish(attention_, tile, partial(place, head, 0), plan_.parts, plan_.partial);
}

void PreparedAttention::run_part(std::int64_t job, std::int64_t part, std::int64_t worker) const {
    const Attention& a = attention_;
    const std::int64_t place = plan_.parts > 1 ? job : worker;
    for (std::int64_t head = 0; head < plan_.heads; ++head) {
        const Partial cleared = partial(place, head, part);
        std::fill_n(cleared.values, plan_.rows * plan_.width, 0.0f);
        std::fill_n(cleared.maximum, plan_.rows, -std::numeric_limits<float>::infinity());
        std::fill_n(cleared.sum, plan_.rows, 0.0f);
    }
    Tile tile = tile_of(a, plan_, job);
    const KeyRange keys = key_range(a, tile.batch, tile.row_begin, tile.row_end);
    // The part's keys when all of them are counted, those kept first.
    const std::int64_t begin = smaller(part * plan_.part_keys, keys.count());
    const std::int64_t end = smaller(begin + plan_.part_keys, keys.count());
    const std::int64_t skipped = keys.begin - keys.kept;
    const std::int64_t ranges[2][2] = {{smaller(begin, keys.kept), smaller(end, keys.kept)},
                                       {larger(begin, keys.kept) + skipped, larger(end, keys.kept) + skipped}};
    const Partial out = partial(place, 0, part);
    float* scratch = memory_ + partials() * plan_.partial + worker * plan_.working;
    for (const auto& range : ranges) {
        tile.key_begin = range[0];
        tile.key_end = range[1];
        if (tile.key_begin == tile.key_end)
            continue;
        if (plan_.few)
            kernels_->few(a, tile, out, plan_.parts * plan_.partial, scratch);
        else
            kernels_->many(a, tile, out, scratch);
    }
    for (std::int64_t head = 0; plan_.parts == 1 && head < plan_.heads; ++head)
        finish(job, place, head);
}

void PreparedAttention::run() const {
    if (empty(attention_))
        return;
    if (kernels_ == nullptr)
        return attend_reference(attention_, threads_, reinterpret_cast<double*>(memory_));
    threads_.run(static_cast<std::size_t>(plan_.jobs * plan_.parts), [&](std::size_t index, std::size_t worker) {
        const std::int64_t n = static_cast<std::int64_t>(index);
        run_part(n % plan_.jobs, n / plan_.jobs, static_cast<std::int64_t>(worker));
    });
    if (plan_.parts > 1)
        threads_.run(static_cast<std::size_t>(plan_.jobs * plan_.heads), [&](std::size_t index, std::size_t) {
            const std::int64_t job = static_cast<std::int64_t>(index) / plan_.heads;
            finish(job, job, static_cast<std::int64_t>(index) % plan_.heads);
        });
}

} // namespace gr
