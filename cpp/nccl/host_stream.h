#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "device.h"

namespace zcomm::nccl {

// What a Stream of a host device points to. Work runs in the order of queueing, concurrently with other streams.
class WorkStream {
 public:
  virtual ~WorkStream() = default;
  // `work` must not throw: an exception on the stream's thread ends the process.
  virtual void Queue(std::function<void()> work) = 0;
};

// What an Event of a host device points to: ready when everything queued before its last Record is done.
struct HostEvent {
  std::shared_future<void> done;

  void Record(WorkStream* stream);
  // Returns at once if the event was never recorded, as CUDA does.
  void Wait() const;
  bool IsDone() const;
};

// A stream with a thread that does its work, started by the first Queue. Without a thread for each stream, a missing
// event wait would go unnoticed in tests.
class HostStream final : public WorkStream {
 public:
  HostStream();
  // Waits for the work that is queued.
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  void Queue(std::function<void()> work) override;
  Stream handle() { return static_cast<WorkStream*>(this); }

  // Waits for the work queued so far on all streams of this process.
  static void WaitForAll();

 private:
  void Serve();

  std::mutex mutex_;              // guards everything below; not held while work runs, so that work may queue more
  std::condition_variable more_;  // queue_ has work, or is_closing_
  std::deque<std::function<void()>> queue_;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace zcomm::nccl
