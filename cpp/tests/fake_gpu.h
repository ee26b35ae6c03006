#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "test_util.h"

namespace zcomm::nccl {

// The GPUs of several ranks, and the links between them, in CPU memory. One thread runs the queued work, in any order
// that streams and events allow. A seed chooses which streams go first and for how long, so that work that is not
// ordered by events runs in the wrong order for some seed. A transfer has a start (the sent data are read, the receive
// buffer becomes garbage) and an end (it is written), with other work in between.
class FakeWorld {
 public:
  explicit FakeWorld(std::uint32_t seed);
  ~FakeWorld();

  // While paused, nothing runs, as on a GPU that is far behind its host.
  void Pause();
  void Resume();
  // Waits until no work is left that could run.
  void Synchronize();

  // The `number`-th call (from 0) of rank `rank` that may fail throws "injected failure in NAME".
  void FailAt(std::size_t rank, std::size_t number);
  // The `number`-th wait for an event of rank `rank` is forgotten.
  void ForgetWait(std::size_t rank, std::size_t number);
  // The `number`-th transfer of rank `rank` leaves the end of everything it receives as it was.
  void Shorten(std::size_t rank, std::size_t number);
  // The `number`-th call of rank `rank` that may fail does not return before the rank's transports are aborted. Then it
  // fails or does its work.
  void HangAt(std::size_t rank, std::size_t number, bool then_fails = true);
  // Calls that may fail, and waits, of a rank since it was last asked.
  std::size_t TakeNumCalls(std::size_t rank);
  std::size_t TakeNumWaits(std::size_t rank);
  // The calls of a rank to its GPU and to NCCL since this was last called, by name: kernels, transfers, events, waits.
  std::map<std::string, std::size_t> TakeCounts(std::size_t rank);
  // The links that a rank has aborted, in that order, each by its ranks.
  std::vector<std::vector<std::size_t>> Aborted(std::size_t rank);
  // Sets what AsyncError() returns on `rank`.
  void SetAsyncError(std::size_t rank, const std::string& text);

  // The number of kernels that ran while a transfer of the same rank was in flight.
  std::size_t num_overlaps() const { return num_overlaps_; }
  // Streams, events, buffers, registrations and transports that exist.
  std::size_t num_alive() const { return num_alive_; }

  std::shared_ptr<Device> MakeDevice(std::size_t rank);
  std::shared_ptr<Kernels> MakeKernels(std::size_t rank);
  // `ranks` are those of the link, this one's at `index`; `link` names it.
  std::unique_ptr<Transport> MakeTransport(int link, const std::vector<std::size_t>& ranks, std::size_t index);

  // A stream of the caller's own. Freed with the world.
  Stream MakeStream(std::size_t rank);
  // Queues any work.
  void Queue(Stream stream, std::function<void()> work);
  // Everything queued on `stream`, and on streams that wait for it, becomes a graph instead of running. Until the end
  // of the capture, the calling thread must not query an event, allocate, free or wait for the device: as in CUDA, such
  // a call fails and invalidates the capture, whose end then throws. Other threads may, and events may be created and
  // destroyed.
  void BeginCapture(Stream stream);
  std::function<void()> EndCapture(Stream stream);

 private:
  friend class FakeDevice;
  friend class FakeKernels;
  friend class FakeTransport;

  struct Transfer {  // one exchange, of all ranks of a link
    std::map<std::size_t, std::vector<std::uint8_t>> sent;
    std::set<std::size_t> aborted;
  };
  struct Operation {
    std::function<bool()> is_ready;  // asked under the lock
    std::function<void()> run;
    bool is_kernel = false;
  };
  struct FakeStream {
    std::size_t rank;
    std::deque<Operation> queued;
    bool is_captured = false;
    std::uint32_t priority = 0;
  };
  struct FakeEvent {
    std::shared_ptr<bool> is_done;
    bool is_captured = false;
  };
  struct OfRank {
    std::size_t num_calls = 0;
    std::size_t num_waits = 0;
    std::map<std::string, std::size_t> counts;
    std::size_t fail_at = SIZE_MAX;
    std::size_t hang_at = SIZE_MAX;
    bool hang_fails = true;
    bool is_aborted = false;
    std::vector<std::vector<std::size_t>> aborted;
    std::size_t forget_at = SIZE_MAX;
    std::size_t num_transfers = 0;
    std::size_t shorten_at = SIZE_MAX;
    std::size_t num_transfers_in_flight = 0;
    std::string async_error;
  };

  // All private functions are called under the lock.
  void MayFail(std::size_t rank, const char* name);
  void RefuseWhileCapturing(const char* name);
  void Enqueue(Stream stream, std::function<Operation()> make);
  void RecordEvent(FakeEvent* event, Stream stream);
  void WaitEvent(Stream stream, FakeEvent* event);
  void Serve();
  FakeStream* Choose();
  static FakeStream* Of(Stream stream) { return static_cast<FakeStream*>(stream); }

  std::mutex mutex_;
  std::condition_variable changed_;
  Random random_;
  std::uint32_t starved_stream_;  // the stream that runs only when no other can
  std::vector<std::unique_ptr<FakeStream>> streams_;
  std::map<std::size_t, OfRank> ranks_;
  std::map<std::pair<int, std::size_t>, Transfer> transfers_;  // by link and number
  std::vector<std::function<void()>>* graph_ = nullptr;
  std::thread::id captures_;  // no thread: none
  std::string invalidated_by_;
  std::vector<std::unique_ptr<std::vector<std::function<void()>>>> graphs_;
  std::size_t num_overlaps_ = 0;
  std::size_t num_alive_ = 0;
  std::size_t steps_until_new_priorities_ = 0;
  bool is_paused_ = false;
  bool is_idle_ = true;
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace zcomm::nccl
