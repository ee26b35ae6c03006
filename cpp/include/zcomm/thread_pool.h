#pragma once

#include <cstddef>
#include <functional>

namespace zcomm {

// Calls body(begin, end) for disjoint ranges that cover [0, count), on up to `num_threads` threads: the caller, and
// workers that live as long as the process. Returns when all those calls have returned. Only the last range may be
// shorter than `grain`; with count <= grain or num_threads == 1 the caller runs body(0, count). The split may depend on
// num_threads, so `body` must give the same result for any split. If `body` throws, the first exception is rethrown
// after all other ranges have ended.
//
// Several threads may call at once, and `body` may call ParallelFor: the caller always works on its own ranges, so that
// no call depends on a free worker and nested calls cannot deadlock. After fork() the child starts its own workers.
//
// On Linux, if there are at least as many threads as processors that the caller may run on, the workers are bound to
// these processors except the one the caller is running on (see AvoidCpuOfCaller in thread_pool.cc).
void ParallelFor(std::size_t count, std::size_t grain, std::size_t num_threads,
                 const std::function<void(std::size_t begin, std::size_t end)>& body);

}  // namespace zcomm
