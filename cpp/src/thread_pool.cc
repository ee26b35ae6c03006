#include "zcomm/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace zcomm {
namespace {

// More ranges than threads: if a thread starts late or is descheduled, the others do most of its share.
constexpr std::size_t kRangesPerThread = 4;
constexpr std::size_t kMaxWorkers = 255;

// One ParallelFor call. Every participating thread claims ranges until none is left, so that the caller can finish the
// job even if no worker ever picks it up.
class Job {
 public:
  Job(std::size_t count, std::size_t num_ranges, const std::function<void(std::size_t, std::size_t)>& body)
      : count_(count), num_ranges_(num_ranges), body_(body), unfinished_(num_ranges) {}

  void Work() {
    // The atomic counter gives each range to one thread. It need not publish data: mutex_ below does.
    for (std::size_t i = next_.fetch_add(1); i < num_ranges_; i = next_.fetch_add(1)) {
      std::exception_ptr error;
      try {
        body_(Bound(i), Bound(i + 1));
      } catch (...) {
        error = std::current_exception();
      }
      // The lock orders this range's writes before the caller's return from Wait().
      const std::lock_guard<std::mutex> lock(mutex_);
      // Moved, so that the worker keeps no reference: the caller, which reads the exception unlocked, also frees it.
      if (error && !error_) error_ = std::move(error);
      if (--unfinished_ == 0) done_.notify_all();
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return unfinished_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  // Start of range i. Ranges differ in length by at most one element.
  std::size_t Bound(std::size_t i) const { return count_ / num_ranges_ * i + std::min(i, count_ % num_ranges_); }

  const std::size_t count_;
  const std::size_t num_ranges_;
  // The caller's own object: it outlives Wait(), after which no range starts. A worker that is late still holds the
  // Job, but finds no range left and does not call it.
  const std::function<void(std::size_t, std::size_t)>& body_;
  std::atomic<std::size_t> next_{0};  // the next range to claim
  std::mutex mutex_;                  // guards unfinished_ and error_
  std::condition_variable done_;      // unfinished_ has become 0
  std::size_t unfinished_;
  std::exception_ptr error_;
};

// Set in workers, whose nested calls must not change the affinity: AvoidCpuOfCaller is about the outermost caller.
thread_local bool is_worker = false;

// Workers are detached and the pool is never destroyed. At process exit workers still wait on the pool's mutex and
// condition variable: if a static destructor freed these, the exit could crash or hang.
class Pool {
 public:
  void Submit(const std::shared_ptr<Job>& job, std::size_t num_helpers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_helpers = std::min(num_helpers, kMaxWorkers);
    // push_back must not throw once a thread has started: destroying a joinable std::thread ends the process.
    workers_.reserve(num_helpers);
    try {
      while (workers_.size() < num_helpers) {
        std::thread worker([this] { Loop(); });
        workers_.push_back(worker.native_handle());
        worker.detach();
      }
    } catch (const std::system_error&) {  // no more threads allowed: the existing ones and the caller do the work
    }
    if (!is_worker) AvoidCpuOfCaller();
    try {
      for (std::size_t i = 0; i < std::min(num_helpers, workers_.size()); ++i) {
        queue_.push_back(job);
        wake_.notify_one();
      }
    } catch (const std::bad_alloc&) {  // the caller must stay: those that have the job call its function
    }
  }

 private:
  void Loop() {
    is_worker = true;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !queue_.empty(); });
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      job->Work();
    }
  }

  // If there are enough threads to fill all processors, binds the workers to the processors other than the caller's.
  // Otherwise Linux often wakes a worker on the caller's processor, where it waits a time slice of milliseconds while
  // another processor is idle (seen in a virtual machine with two). A caller bound to one processor changes nothing.
  void AvoidCpuOfCaller() {
#ifdef __linux__
    const int cpu = sched_getcpu();
    cpu_set_t allowed;
    if (cpu < 0 || cpu >= CPU_SETSIZE || pthread_getaffinity_np(pthread_self(), sizeof(allowed), &allowed) != 0) return;
    const int num_cpus = CPU_COUNT(&allowed);
    if (num_cpus == 1 || static_cast<std::size_t>(num_cpus) > workers_.size() + 1) return;
    CPU_CLR(cpu, &allowed);
    if (workers_.size() == num_bound_ && CPU_EQUAL(&allowed, &of_workers_)) return;
    for (const pthread_t worker : workers_) pthread_setaffinity_np(worker, sizeof(allowed), &allowed);
    of_workers_ = allowed;
    num_bound_ = workers_.size();
#endif
  }

  std::mutex mutex_;              // guards everything below; not held while a job runs
  std::condition_variable wake_;  // queue_ has a job
  std::deque<std::shared_ptr<Job>> queue_;
  std::vector<pthread_t> workers_;
#ifdef __linux__
  cpu_set_t of_workers_;       // the affinity that was last set
  std::size_t num_bound_ = 0;  // how many workers have it
#endif
};

// The pool of this process. A child of fork() inherits the parent's pool, but not its threads, and the mutex may be
// locked by one of those: a job submitted to it would wait for workers that do not exist, or deadlock. So a pool is
// used only in the process that made it. Two threads of the child may make its pool at once: the compare-and-swap keeps
// one, and the other thread deletes its own.
Pool& ProcessPool() {
  struct Owned {
    Pool pool;
    pid_t pid = getpid();
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* owned = current.load();
  while (owned == nullptr || owned->pid != getpid()) {
    Owned* fresh = new Owned;
    if (current.compare_exchange_strong(owned, fresh)) return fresh->pool;
    delete fresh;
  }
  return owned->pool;
}

}  // namespace

void ParallelFor(std::size_t count, std::size_t grain, std::size_t num_threads,
                 const std::function<void(std::size_t, std::size_t)>& body) {
  if (count == 0) return;
  const std::size_t max_ranges = std::max<std::size_t>(1, count / std::max<std::size_t>(1, grain));
  const std::size_t threads = std::min(num_threads, std::min(max_ranges, kMaxWorkers + 1));
  if (threads <= 1) {
    body(0, count);
    return;
  }
  const auto job = std::make_shared<Job>(count, std::min(max_ranges, threads * kRangesPerThread), body);
  ProcessPool().Submit(job, threads - 1);
  job->Work();
  job->Wait();
}

}  // namespace zcomm
