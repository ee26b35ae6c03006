#include "zcomm/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>

#include "test_util.h"

namespace {

thread_local std::size_t allocations_until_failure = 0;  // 0: none fails

}  // namespace

// Not inlined: of a pair of which one is, GCC 12 warns that malloc and delete, or new and free, do not match.
[[gnu::noinline]] void* operator new(std::size_t nbytes) {
  if (allocations_until_failure > 0 && --allocations_until_failure == 0) throw std::bad_alloc();
  if (void* data = std::malloc(nbytes)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace zcomm {
namespace {

void CheckEveryIndexOnce(std::size_t count, std::size_t grain, std::size_t num_threads) {
  std::vector<std::atomic<int>> visits(count);
  ParallelFor(count, grain, num_threads, [&](std::size_t begin, std::size_t end) {
    EXPECT(begin < end && end <= count, "%zu..%zu", begin, end);
    EXPECT(end == count || end - begin >= grain, "range %zu..%zu is shorter than %zu", begin, end, grain);
    for (std::size_t i = begin; i < end; ++i) ++visits[i];
  });
  for (std::size_t i = 0; i < count; ++i) EXPECT(visits[i] == 1, "index %zu of %zu", i, count);
}

void CheckRanges() {
  for (const std::size_t count : {0, 1, 2, 7, 100, 1001}) {
    for (const std::size_t grain : {0, 1, 3, 50, 2000}) {
      for (const std::size_t threads : {1, 2, 5}) CheckEveryIndexOnce(count, grain, threads);
    }
  }
}

void CheckOneThreadIsTheCaller() {
  const auto caller = std::this_thread::get_id();
  ParallelFor(100, 1, 1, [&](std::size_t begin, std::size_t end) {
    EXPECT(std::this_thread::get_id() == caller && begin == 0 && end == 100, "inline");
  });
}

void CheckException() {
  std::atomic<int> calls{0};
  const std::string text = MessageOfThrow([&] {
    ParallelFor(64, 1, 4, [&](std::size_t begin, std::size_t /*end*/) {
      ++calls;
      if (begin == 0) throw std::invalid_argument("from the body");
    });
  });
  EXPECT(text == "from the body" && calls > 1, "%s, %d calls", text.c_str(), calls.load());
}

void CheckNestedAndConcurrentCalls() {
  std::atomic<std::size_t> sum{0};
  const auto call = [&] {
    for (int repeat = 0; repeat < 50; ++repeat) {
      ParallelFor(64, 1, 3, [&](std::size_t begin, std::size_t end) {
        ParallelFor(end - begin, 1, 2, [&](std::size_t b, std::size_t e) { sum += e - b; });
      });
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(call);
  for (std::thread& caller : callers) caller.join();
  EXPECT(sum == 4 * 50 * 64, "%zu", sum.load());
}

// Wherever the caller runs out of memory, no range is called after ParallelFor has thrown.
void CheckNoMemory() {
  constexpr std::size_t kThreads = 200;  // their jobs fill several pieces of the pool's queue
  std::atomic<bool> has_left{false};
  std::atomic<std::size_t> num_calls{0};
  std::atomic<std::size_t> num_late{0};
  const std::function<void(std::size_t, std::size_t)> body = [&](std::size_t, std::size_t) {
    ++num_calls;
    if (has_left) ++num_late;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  ParallelFor(4 * kThreads, 1, kThreads, body);  // starts the workers
  for (std::size_t failure = 1; failure <= 6; ++failure) {
    num_calls = 0;
    has_left = false;
    allocations_until_failure = failure;
    const bool has_failed = !MessageOf<std::bad_alloc>([&] { ParallelFor(4 * kThreads, 1, kThreads, body); }).empty();
    has_left = true;
    allocations_until_failure = 0;
    if (has_failed) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT(num_late == 0, "allocation %zu: %zu calls came late", failure, num_late.load());
    EXPECT(has_failed || num_calls == 4 * kThreads, "allocation %zu: only %zu calls", failure, num_calls.load());
  }
}

// The child has none of the parent's workers.
template <class Check>
void CheckAfterFork(const Check& check) {
  const pid_t child = fork();
  if (child == 0) {
    check();
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && status == 0, "status %d", status);
}

#ifdef __linux__
bool Bind(const cpu_set_t& to) { return pthread_setaffinity_np(pthread_self(), sizeof(to), &to) == 0; }

// The processors that the worker of a call with two threads may run on; the caller waits until it takes part.
cpu_set_t AllowedOfAWorker() {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> has_worker{false};
  cpu_set_t seen;
  CPU_ZERO(&seen);
  ParallelFor(2, 1, 2, [&](std::size_t, std::size_t) {
    if (std::this_thread::get_id() == caller) {
      while (!has_worker) sched_yield();
    } else if (!has_worker) {
      EXPECT(pthread_getaffinity_np(pthread_self(), sizeof(seen), &seen) == 0, "getaffinity");
      has_worker = true;
    }
  });
  return seen;
}

// Runs in a child, whose pool has no worker yet. A caller on two processors has its worker on the other one, wherever
// it is itself; one that is bound to a single processor leaves the worker where it was.
void CheckWorkersRunBesideTheCaller() {
  cpu_set_t allowed;
  if (pthread_getaffinity_np(pthread_self(), sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) {
    std::puts("skipped: workers beside the caller need two processors, and leave to choose them");
    return;
  }
  int cpus[2];
  for (int cpu = 0, found = 0; found < 2; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus[found++] = cpu;
  }
  cpu_set_t one[2];
  cpu_set_t both;
  CPU_ZERO(&both);
  for (int i = 0; i < 2; ++i) {
    CPU_ZERO(&one[i]);
    CPU_SET(cpus[i], &one[i]);
    CPU_SET(cpus[i], &both);
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT(Bind(one[i]) && Bind(both), "setaffinity");  // it has moved to that processor, and mostly stays
    const cpu_set_t of_worker = AllowedOfAWorker();
    EXPECT(CPU_EQUAL(&of_worker, &one[0]) || CPU_EQUAL(&of_worker, &one[1]), "%d processors", CPU_COUNT(&of_worker));
    for (const cpu_set_t& bound : one) {
      EXPECT(Bind(bound), "setaffinity");
      const cpu_set_t still = AllowedOfAWorker();
      EXPECT(CPU_EQUAL(&still, &of_worker), "a bound caller has moved its worker");
    }
  }
}
#endif

}  // namespace
}  // namespace zcomm

int main() {
  zcomm::CheckRanges();
  zcomm::CheckOneThreadIsTheCaller();
  zcomm::CheckException();
  zcomm::CheckNestedAndConcurrentCalls();
  zcomm::CheckAfterFork([] { zcomm::CheckEveryIndexOnce(1000, 1, 3); });
  zcomm::CheckAfterFork(zcomm::CheckNoMemory);
#ifdef __linux__
  zcomm::CheckAfterFork(zcomm::CheckWorkersRunBesideTheCaller);
#endif
  std::puts("ok");
  return 0;
}
