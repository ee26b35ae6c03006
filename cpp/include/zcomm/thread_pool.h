#pragma once

#include <cstddef>
#include <functional>

namespace zcomm {

// Calls body(begin, end) for disjoint ranges that cover [0, count), on up to `num_threads` threads: the caller and
// workers that live as long as the process. Returns when all calls have. No range but the last is shorter than `grain`;
// count <= grain or num_threads == 1 runs body(0, count) on the caller. The split may depend on num_threads, so `body`
// must give the same result for any split. The first exception of `body` is rethrown, after the others have ended.
//
// On Linux, where threads are as many as the caller's processors, the workers' affinity becomes these without the one
// the caller is on. Several threads may call at once, and `body` may call again. After fork() the child starts workers
// of its own.
void ParallelFor(std::size_t count, std::size_t grain, std::size_t num_threads,
                 const std::function<void(std::size_t begin, std::size_t end)>& body);

}  // namespace zcomm
