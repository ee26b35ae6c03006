#include "communicator.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "zcomm/check.h"

namespace zcomm::nccl {
namespace {

constexpr auto kWatchInterval = std::chrono::milliseconds(100);
constexpr auto kPollInterval = std::chrono::microseconds(200);

// Marks, while it lives, that a call is being queued, which must be done by `deadline`.
class Queueing {
 public:
  using Clock = std::chrono::steady_clock;
  Queueing(std::atomic<Clock::rep>* queueing_deadline, Clock::time_point deadline)
      : queueing_deadline_(queueing_deadline) {
    queueing_deadline->store(deadline.time_since_epoch().count());
  }
  ~Queueing() { queueing_deadline_->store(0); }
  Queueing(const Queueing&) = delete;
  Queueing& operator=(const Queueing&) = delete;

 private:
  std::atomic<Clock::rep>* queueing_deadline_;
};

std::vector<Transport*> Pointers(const std::vector<std::unique_ptr<Transport>>& hops) {
  std::vector<Transport*> pointers;
  for (const auto& hop : hops) pointers.push_back(hop.get());
  return pointers;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Device> device, std::shared_ptr<Kernels> kernels,
                           std::vector<std::unique_ptr<Transport>> hops, std::chrono::duration<double> timeout)
    : device_(std::move(device)),
      kernels_(std::move(kernels)),
      hops_(std::move(hops)),
      parts_{kernels_.get(), Pointers(hops_)},
      timeout_(timeout),
      pipeline_(device_.get()),
      registrations_(hops_.size(), nullptr) {
  ZCOMM_CHECK(hops_.size() == 1 || hops_.size() == 2, "there must be one hop or two: hops=", hops_.size());
  workspace_free_ = device_->CreateEvent();
  try {
    watch_thread_ = std::thread([this] { Watch(); });
  } catch (...) {
    device_->DestroyEvent(workspace_free_);
    throw;
  }
}

Communicator::~Communicator() {
  // First the watch thread, which uses every member. Then Finish: the streams must not use memory that is freed next.
  {
    const std::lock_guard<std::mutex> lock(closing_mutex_);
    is_closing_ = true;
  }
  closing_.notify_all();
  watch_thread_.join();
  Finish();
  FreeWorkspace();
  for (const InFlight& call : in_flight_) device_->DestroyEvent(call.end);
  for (const Event event : idle_events_) device_->DestroyEvent(event);
  device_->DestroyEvent(workspace_free_);
}

void Communicator::Run(const GatherCall& call, const Place& place) {
  RunPlan("all_gather", MakePlan(call, parts_, place.is_valid), place, Flow::kInward);
}

void Communicator::Run(const ReduceCall& call, const Place& place) {
  RunPlan("reduce_scatter", MakePlan(call, parts_, place.is_valid), place, Flow::kOutward);
}

void Communicator::Run(const ExchangeCall& call, const Place& place) {
  RunPlan("all_to_all", MakePlan(call, parts_, place.is_valid), place, Flow::kOutward);
}

void Communicator::Run(const BytesCall& call, const Place& place) {
  RunPlan("exchange_bytes", MakePlan(call, parts_), place, Flow::kOutward);
}

void Communicator::RunPlan(const char* name, const Plan& plan, const Place& place, Flow flow) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_);
  const Queueing queueing(&queueing_deadline_, deadline);
  queued_name_ = name;
  const bool is_captured = device_->IsCapturing(place.stream);
  if (!is_captured) Poll();  // queries events, which would invalidate a capture
  ThrowIfFailed();
  if (in_flight_.empty()) oldest_flow_ = flow;
  ZCOMM_CHECK(place.workspace == nullptr ? !is_captured || plan.slot_nbytes == 0
                                         : place.workspace_nbytes >= plan.workspace_nbytes(),
              name, " needs a workspace of ", plan.workspace_nbytes(), " bytes while its stream is captured, got ",
              place.workspace_nbytes);
  try {
    if (is_captured || place.workspace != nullptr || plan.slot_nbytes == 0) {
      pipeline_.Run(plan, place.workspace, place.stream);
    } else {
      std::uint8_t* workspace = GrownWorkspace(plan.workspace_nbytes());
      device_->Wait(place.stream, workspace_free_);  // the last call that used it may be on another stream
      pipeline_.Run(plan, workspace, place.stream);
      device_->Record(workspace_free_, place.stream);
    }
    if (!is_captured) {  // an event recorded in a capture cannot be queried: no deadline is kept
      if (idle_events_.empty()) idle_events_.push_back(device_->CreateEvent());
      device_->Record(idle_events_.back(), place.stream);
      in_flight_.push_back({idle_events_.back(), deadline, name, flow});
      idle_events_.pop_back();
    }
    // Last: whichever step was stuck and has returned since, the results are undefined.
    if (is_stuck_) throw std::runtime_error("aborted while it was being queued");
  } catch (const std::exception& error) {
    Fail(is_stuck_ ? StuckText() : std::string(name) + " failed: " + error.what());
    ThrowIfFailed();
  }
}

std::uint8_t* Communicator::GrownWorkspace(std::size_t nbytes) {
  if (nbytes <= workspace_nbytes_) return workspace_;
  // Calls in flight still use the old workspace.
  if (!DrainUntil(Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_))) {
    throw std::runtime_error("earlier calls did not complete before the timeout");
  }
  FreeWorkspace();
  std::size_t room = 1;
  while (room < nbytes) room *= 2;
  workspace_ = static_cast<std::uint8_t*>(device_->Allocate(room));
  workspace_nbytes_ = room;
  for (std::size_t hop = 0; hop < hops_.size(); ++hop) registrations_[hop] = hops_[hop]->Register(workspace_, room);
  return workspace_;
}

void Communicator::FreeWorkspace() noexcept {
  for (std::size_t hop = 0; hop < hops_.size(); ++hop) {
    if (registrations_[hop] != nullptr && failure_.empty()) hops_[hop]->Deregister(registrations_[hop]);
    registrations_[hop] = nullptr;  // an aborted communicator has released its registrations
  }
  if (workspace_ != nullptr) device_->Free(workspace_);
  workspace_ = nullptr;
  workspace_nbytes_ = 0;
}

void Communicator::Check() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Poll();
  ThrowIfFailed();
}

std::string Communicator::Finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_);
  if (failure_.empty() && !DrainUntil(deadline)) {
    Fail("the communicator was closed, and its calls did not complete before the timeout");
  }
  return failure_;
}

void Communicator::Abort(const std::string& reason) {
  // The mutex may be held by a call that hangs. Try for a while, because an abort under the mutex is safer;
  // then abort without it.
  const auto deadline = Clock::now() + kWatchInterval;
  do {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) return Fail(reason);
    std::this_thread::sleep_for(kPollInterval);
  } while (Clock::now() < deadline);
  AbortWhileQueueing(reason);
}

void Communicator::Fail(const std::string& reason) noexcept {
  if (!failure_.empty()) return;
  failure_ = reason;
  AbortHops();
}

// Aborts the hop that the oldest call uses second, then the other. Once a hop is aborted, the stages that waited for it
// go on with stale buffers. In the other order they would send these over the hop that still works, to ranks that would
// accept them (test: CheckOrderOfAborts).
void Communicator::AbortHops() noexcept {
  const bool is_outward = oldest_flow_ == Flow::kOutward;
  for (std::size_t i = 0; i < hops_.size(); ++i) hops_[is_outward ? hops_.size() - 1 - i : i]->Abort();
}

void Communicator::ThrowIfFailed() const {
  if (!failure_.empty()) throw std::runtime_error(failure_ + "; the communicator has been aborted");
}

// Removes completed calls. Fails if one is past its deadline, or if NCCL reports an error. Requires mutex_.
void Communicator::Poll() {
  if (!failure_.empty()) return;
  // The abort may have come when the call was all but queued. Aborted work counts as done: only this tells of it.
  if (is_stuck_) return Fail(StuckText());
  try {
    while (!in_flight_.empty() && device_->IsDone(in_flight_.front().end)) {
      idle_events_.push_back(in_flight_.front().end);
      in_flight_.pop_front();
      if (!in_flight_.empty()) oldest_flow_ = in_flight_.front().flow;
    }
    for (const auto& hop : hops_) {
      const std::string error = hop->AsyncError();
      if (!error.empty()) return Fail(error);
    }
  } catch (const std::exception& error) {
    return Fail(error.what());
  }
  if (!in_flight_.empty() && Clock::now() > in_flight_.front().deadline) {
    Fail(TimeoutText(in_flight_.front().name));
  }
}

void Communicator::Watch() {
  const auto pause =
      std::min<Clock::duration>(kWatchInterval, std::chrono::duration_cast<Clock::duration>(timeout_ / 4));
  std::unique_lock<std::mutex> closing(closing_mutex_);
  while (!closing_.wait_for(closing, pause, [this] { return is_closing_; })) {
    // Only try: a call that hangs holds the mutex, and this thread is the one to abort it.
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      Poll();
    } else {
      AbortIfQueueingTimedOut();
    }
  }
}

void Communicator::AbortIfQueueingTimedOut() {
  const Clock::rep queueing_deadline = queueing_deadline_.load();
  if (queueing_deadline != 0 && Clock::now().time_since_epoch().count() >= queueing_deadline) AbortWhileQueueing("");
}

// The thread that queues a call holds mutex_. It may hang in CUDA (the stream's queue is full because a peer has died),
// in NCCL (which connects at the first use), or in waiting for earlier calls. This aborts NCCL from another thread: the
// abort flag ends the kernels and waits that the call hangs in. NCCL documents this for nonblocking communicators only,
// but there is no other way out (test: CheckStuckCalls).
void Communicator::AbortWhileQueueing(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(stuck_mutex_);
    if (is_stuck_) return;
    stuck_reason_ = reason;
    is_stuck_ = true;
  }
  AbortHops();
}

std::string Communicator::StuckText() const {
  return stuck_reason_.empty() ? TimeoutText(queued_name_) : stuck_reason_;
}

std::string Communicator::TimeoutText(const char* name) const {
  return std::string(name) + " timed out after " + std::to_string(timeout_.count()) + " s";
}

// Waits until all calls are complete. Returns false if the deadline passes or the communicator fails. Requires mutex_.
bool Communicator::DrainUntil(Clock::time_point deadline) {
  for (Poll(); failure_.empty() && !in_flight_.empty(); Poll()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return failure_.empty();
}

}  // namespace zcomm::nccl
