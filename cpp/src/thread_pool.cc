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
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace zcomm {
namespace {

// More ranges than threads, so that a thread that starts late or is descheduled delays only a part of its share.
constexpr std::size_t kRangesPerThread = 4;
constexpr std::size_t kMaxWorkers = 255;

// One ParallelFor call. Whoever takes part claims ranges until none is left, so a job ends without any worker's help.
class Job {
 public:
  Job(std::size_t count, std::size_t num_ranges, const std::function<void(std::size_t, std::size_t)>& body)
      : count_(count), num_ranges_(num_ranges), body_(body), unfinished_(num_ranges) {}

  void Work() {
    for (std::size_t i = next_.fetch_add(1); i < num_ranges_; i = next_.fetch_add(1)) {
      std::exception_ptr error;
      try {
        body_(Bound(i), Bound(i + 1));
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (error && !error_) error_ = std::move(error);  // only the caller frees it: it reads it unlocked
      if (--unfinished_ == 0) done_.notify_all();
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return unfinished_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  // Ranges differ by one element at most.
  std::size_t Bound(std::size_t i) const { return count_ / num_ranges_ * i + std::min(i, count_ % num_ranges_); }

  const std::size_t count_;
  const std::size_t num_ranges_;
  const std::function<void(std::size_t, std::size_t)>& body_;  // outlives Wait(), and no range starts after it
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable done_;
  std::size_t unfinished_;
  std::exception_ptr error_;
};

thread_local bool is_worker = false;

// Workers are detached and the pool is never destroyed: at process exit a worker sleeps on memory that stays valid.
class Pool {
 public:
  void Submit(const std::shared_ptr<Job>& job, std::size_t num_helpers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_helpers = std::min(num_helpers, kMaxWorkers);
    workers_.reserve(num_helpers);  // no memory is needed once a worker has begun
    try {
      while (workers_.size() < num_helpers) {
        std::thread worker([this] { Loop(); });
        workers_.push_back(worker.native_handle());
        worker.detach();
      }
    } catch (const std::system_error&) {  // the system allows no more threads: those that there are, and the caller, do
    }
    if (!is_worker) AvoidCpuOfCaller();
    for (std::size_t i = 0; i < std::min(num_helpers, workers_.size()); ++i) {
      queue_.push_back(job);
      wake_.notify_one();
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

  // Where threads are to fill all processors, workers wake on others than the caller's. Left alone, Linux often wakes a
  // worker on the caller's, where it waits for a time slice of milliseconds while another processor sleeps (seen on two
  // in a virtual machine). A caller that is bound to one processor leaves the workers as they are.
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

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::vector<pthread_t> workers_;
#ifdef __linux__
  cpu_set_t of_workers_;
  std::size_t num_bound_ = 0;  // workers that may run on those alone
#endif
};

// The pool of this process. A child of fork() inherits the parent's pool without its threads, and possibly locked.
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
