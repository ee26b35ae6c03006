#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "device.h"

namespace zcomm::nccl {

// What a Stream of a host device points to. Work runs in the order of queueing, beside that of other streams.
class WorkStream {
 public:
  virtual ~WorkStream() = default;
  // `work` does not throw.
  virtual void Queue(std::function<void()> work) = 0;
};

// What an Event of a host device points to: ready when all is done that was queued up to its last record.
struct HostEvent {
  std::shared_future<void> done;

  void Record(WorkStream* stream);
  // Of an event that was never recorded: nothing to wait for.
  void Wait() const;
  bool IsDone() const;
};

// A stream whose work is done by a thread of its own, which is started when first needed.
class HostStream final : public WorkStream {
 public:
  HostStream();
  // Waits for what is queued.
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  void Queue(std::function<void()> work) override;
  Stream handle() { return static_cast<WorkStream*>(this); }

  // Waits for what is queued on any stream of this process.
  static void WaitForAll();

 private:
  void Serve();

  std::mutex mutex_;  // of everything below
  std::condition_variable more_;
  std::deque<std::function<void()>> queue_;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace zcomm::nccl
