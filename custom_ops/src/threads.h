// Runs a number of independent jobs on the threads a caller offers.
#pragma once

#include <atomic>
#include <cstddef>

#include "graphrewrite/kernels.h"

namespace gr {

class Threads {
public:
    explicit Threads(const GrThreads* threads);

    // How many jobs may run at once. Results never depend on it: it only sizes per-worker scratch memory.
    std::size_t workers() const { return workers_; }

    // Calls job(index, worker) for every index below `jobs`, each once; worker < workers(), and no two calls with the
    // same worker run at once. Workers take the next index when they are free, so uneven jobs even out. `job` must not
    // throw.
    template <typename Job> void run(std::size_t jobs, const Job& job) const {
        struct Shared {
            const Job& job;
            std::size_t jobs;
            std::atomic<std::size_t> next;
        } shared{job, jobs, {0}};
        const auto work = [](void* argument, std::size_t worker) {
            auto& state = *static_cast<Shared*>(argument);
            for (std::size_t index; (index = state.next.fetch_add(1, std::memory_order_relaxed)) < state.jobs;)
                state.job(index, worker);
        };
        launch(jobs < workers_ ? jobs : workers_, work, &shared);
    }

private:
    void launch(std::size_t workers, void (*work)(void*, std::size_t), void* argument) const;

    const GrThreads* threads_;
    std::size_t workers_;
};

} // namespace gr
