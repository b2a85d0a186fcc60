#include "threads.h"

#include <system_error>
#include <thread>
#include <vector>

namespace gr {

Threads::Threads(const GrThreads* threads)
    : threads_(threads),
      workers_(threads != nullptr && threads->count > 1 ? static_cast<std::size_t>(threads->count) : 1) {}

void Threads::launch(std::size_t workers, void (*work)(void*, std::size_t), void* argument) const {
    if (workers > 1 && threads_->parallel_for != nullptr) {
        threads_->parallel_for(threads_->context, work, workers, argument);
        return;
    }
    std::vector<std::thread> started;
    try {
        for (std::size_t worker = 1; worker < workers; ++worker)
            started.emplace_back(work, argument, worker);
    } catch (const std::system_error&) {
        // No more threads to be had: those that run, this one among them, take all the jobs.
    }
    if (workers > 0)
        work(argument, 0);
    for (std::thread& thread : started)
        thread.join();
}

} // namespace gr
