#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "pipeline.h"
#include "plans.h"

namespace zcomm::nccl {

// Quantized collectives over one or two hops, each call a pipeline of chunks (pipeline.h, plans.h).
//
// A call queues its work behind what is on the caller's stream and returns; what is queued there later runs after it.
// The host waits for nothing, but when the workspace has to grow. While the stream is being captured into a graph the
// caller gives the workspace, which belongs to the graph; no time limit is kept for its replays.
//
// Errors: a call that fails, an error that NCCL reports later, and a call that has not ended `timeout` after it was
// queued end the communicator: everything under way is aborted, its results are of no use, and every later call throws
// std::runtime_error with what had gone wrong. Other ranks find out by their own NCCL, or their own time limit. A call
// that does not even get queued in time, because CUDA or NCCL does not return, is ended in the same way, by a thread.
//
// Thread-safe; calls of several threads are queued one after the other. The ranks must make the same calls in the same
// order.
class Communicator {
 public:
  // `hops`: one over all ranks, or two, inside the node and between nodes.
  Communicator(std::shared_ptr<Device> device, std::shared_ptr<Kernels> kernels,
               std::vector<std::unique_ptr<Transport>> hops, std::chrono::duration<double> timeout);
  // As Finish(), and frees everything.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  void Run(const GatherCall& call, const Place& place);
  void Run(const ReduceCall& call, const Place& place);
  void Run(const ExchangeCall& call, const Place& place);
  void Run(const BytesCall& call, const Place& place);

  // Bytes of workspace of a call that is captured.
  template <class Call>
  std::size_t WorkspaceNbytes(const Call& call) {
    return MakePlan(call, parts_).workspace_nbytes();
  }

  // Looks for errors and for calls that are late; a thread does this all the time. Throws what has gone wrong.
  void Check();
  // Waits for what is under way, at most until its time is up, which aborts it. Returns what has gone wrong; empty:
  // nothing.
  std::string Finish();
  // Aborts what is under way, under a call that is being queued, too; every later call throws `reason`, or that.
  void Abort(const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;
  // Of two hops, which comes first: inside the node (outward) or between nodes (inward).
  enum class Flow { kOutward, kInward };
  struct UnderWay {
    Event end;
    Clock::time_point deadline;
    const char* name;
    Flow flow;
  };

  void RunPlan(const char* name, const Plan& plan, const Place& place, Flow flow);
  std::uint8_t* GrownWorkspace(std::size_t nbytes);
  void FreeWorkspace() noexcept;
  void Fail(const std::string& reason) noexcept;
  void AbortHops() noexcept;
  void Look();
  void Watch();
  void EndStuckCall();
  void AbortUnderCall(const std::string& reason);
  std::string LateText(const char* name) const;
  bool DrainUntil(Clock::time_point deadline);
  void ThrowIfFailed() const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<Kernels> kernels_;
  std::vector<std::unique_ptr<Transport>> hops_;
  PlanParts parts_;
  std::chrono::duration<double> timeout_;
  Pipeline pipeline_;
  Event workspace_free_ = nullptr;  // of the last call that used the workspace

  std::mutex mutex_;  // of everything below, and of queueing
  std::uint8_t* workspace_ = nullptr;
  std::size_t workspace_nbytes_ = 0;
  std::vector<void*> registrations_;  // of the workspace, by hop
  std::deque<UnderWay> under_way_;
  std::atomic<Flow> oldest_flow_{Flow::kOutward};  // of the first of them, or of the call that is being queued
  std::vector<Event> idle_events_;
  std::string failure_;

  std::atomic<Clock::rep> queued_by_{0};  // by when the call that is being queued has to be; 0: there is none
  std::atomic<bool> is_stuck_{false};     // it was not, or Abort() could not wait for it: it has been aborted
  std::mutex stuck_mutex_;
  std::string stuck_reason_;  // constant once is_stuck_; empty: it was late

  std::mutex closing_mutex_;
  bool is_closing_ = false;
  std::condition_variable closing_;
  std::thread watch_;
};

}  // namespace zcomm::nccl
