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
// A call queues its work after what is on the caller's stream, and returns; work queued there later runs after it. The
// host waits only when the workspace must grow. While the stream is being captured into a CUDA graph, the caller
// provides the workspace, which then belongs to the graph; replays of the graph have no timeout.
//
// Errors: the communicator fails when a call fails, when NCCL reports an error later, and when a call is not complete
// `timeout` after it was queued. Then everything in flight is aborted, its results are undefined, and every later call
// throws std::runtime_error with the first error. Other ranks learn of it through their own NCCL, or their own timeout.
// If queueing itself hangs, because CUDA or NCCL does not return, the watch thread aborts in the same way.
//
// Thread-safe: calls from several threads are queued one after the other. All ranks must make the same calls in the
// same order.
class Communicator {
 public:
  // `hops`: one over all ranks; or two, first inside the node, then between nodes.
  Communicator(std::shared_ptr<Device> device, std::shared_ptr<Kernels> kernels,
               std::vector<std::unique_ptr<Transport>> hops, std::chrono::duration<double> timeout);
  // Calls Finish(), then frees everything. Blocks up to `timeout`.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Queue a collective (plans.h). Throw std::invalid_argument if its sizes or its workspace do not fit, before anything
  // is queued, and std::runtime_error as described above. The buffers must stay valid until the work is done on the
  // GPU.
  void Run(const GatherCall& call, const Place& place);
  void Run(const ReduceCall& call, const Place& place);
  void Run(const ExchangeCall& call, const Place& place);
  void Run(const BytesCall& call, const Place& place);

  // Bytes of workspace that the caller must provide when it captures `call`.
  template <class Call>
  std::size_t WorkspaceNbytes(const Call& call) {
    return MakePlan(call, parts_).workspace_nbytes();
  }

  // Polls for errors and for calls past their deadline, and throws the first error. The watch thread also polls, every
  // 100 ms or more often.
  void Check();
  // Waits until all calls are complete, or aborts them after `timeout`. Returns the error; empty if there is none.
  std::string Finish();
  // Aborts everything in flight, even while another thread hangs in queueing a call. Every later call throws `reason`,
  // unless the communicator had failed before.
  void Abort(const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;
  // Which of two hops a call uses first: the one inside the node (outward), or the one between nodes (inward).
  enum class Flow { kOutward, kInward };
  struct InFlight {
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
  void Poll();
  void Watch();
  void AbortIfQueueingTimedOut();
  void AbortWhileQueueing(const std::string& reason);
  std::string StuckText() const;
  std::string TimeoutText(const char* name) const;
  bool DrainUntil(Clock::time_point deadline);
  void ThrowIfFailed() const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<Kernels> kernels_;
  std::vector<std::unique_ptr<Transport>> hops_;
  PlanParts parts_;
  std::chrono::duration<double> timeout_;
  Pipeline pipeline_;
  // Recorded after the last call that used the workspace. The next call may be on another stream: without waiting for
  // this event it would overwrite messages that are still being sent.
  Event workspace_free_ = nullptr;

  // Guards everything down to failure_, and is held while a call is queued: if two threads queued their NCCL calls
  // interleaved, the order could differ from that of other ranks, a deadlock.
  std::mutex mutex_;
  std::uint8_t* workspace_ = nullptr;
  std::size_t workspace_nbytes_ = 0;
  std::vector<void*> registrations_;  // of the workspace, by hop
  std::deque<InFlight> in_flight_;    // calls in flight, oldest first
  // Of the oldest call in flight, or of the one being queued. Atomic: AbortWhileQueueing reads it without mutex_.
  std::atomic<Flow> oldest_flow_{Flow::kOutward};
  std::vector<Event> idle_events_;
  const char* queued_name_ = "";  // of the call that is being queued, or was last
  std::string failure_;           // the first error; empty if there is none

  // The watch thread and Abort() use the following while another thread hangs in a call and holds mutex_.
  std::atomic<Clock::rep> queueing_deadline_{0};  // deadline of the call that is being queued; 0: there is none
  std::atomic<bool> is_stuck_{false};  // that call has been aborted: it timed out, or Abort() did not wait for it
  std::mutex stuck_mutex_;             // the first of several aborts gives the reason
  std::string stuck_reason_;           // does not change once is_stuck_; empty: the call timed out

  std::mutex closing_mutex_;  // of is_closing_ alone: the watch thread sleeps on it while calls hold mutex_
  bool is_closing_ = false;
  std::condition_variable closing_;
  // Detects errors and timeouts while no thread calls: a rank that waits on the GPU's stream would otherwise never
  // learn that a peer has failed.
  std::thread watch_thread_;
};

}  // namespace zcomm::nccl
