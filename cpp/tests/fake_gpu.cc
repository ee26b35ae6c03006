#include "fake_gpu.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "zcomm/decode.h"
#include "zcomm/quantize.h"
#include "zcomm/reduce.h"

namespace zcomm::nccl {
namespace {

constexpr int kGarbage = 0xCD;

// A kernel clears and writes in no particular order: it must not clear what it writes.
void Clear(const MessageLayout& layout, const Expected& expected, const MutableMessages& output) {
  const std::uint8_t* end = output.data + output.count * output.stride_nbytes;
  for (std::size_t i = 0; i < expected.count; ++i) {
    std::uint8_t* message = expected.data + i * layout.nbytes;
    if (message < output.data || message >= end) std::memset(message + layout.trailer_offset(), 0, kTrailerNbytes);
  }
}

// The kernels check trailers: they throw for a wrong message.
template <class Call>
void Checked(std::int32_t* is_valid, const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    if (is_valid != nullptr) *is_valid = 0;
  }
}

}  // namespace

FakeWorld::FakeWorld(std::uint32_t seed)
    : random_(seed), starved_stream_(random_.Next()), thread_([this] { Serve(); }) {}

FakeWorld::~FakeWorld() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FakeWorld::Pause() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_paused_ = true;
}

void FakeWorld::Resume() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_paused_ = false;
  is_idle_ = false;
  changed_.notify_all();
}

void FakeWorld::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_idle_; });
}

void FakeWorld::FailAt(std::size_t rank, std::size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].num_calls = 0;
  ranks_[rank].fail_at = number;
}

void FakeWorld::HangAt(std::size_t rank, std::size_t number, bool then_fails) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].num_calls = 0;
  ranks_[rank].hang_at = number;
  ranks_[rank].hang_fails = then_fails;
}

void FakeWorld::Shorten(std::size_t rank, std::size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].num_transfers = 0;
  ranks_[rank].shorten_at = number;
}

void FakeWorld::ForgetWait(std::size_t rank, std::size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].num_waits = 0;
  ranks_[rank].forget_at = number;
}

std::size_t FakeWorld::TakeNumCalls(std::size_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ranks_[rank].num_calls, 0);
}

std::size_t FakeWorld::TakeNumWaits(std::size_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ranks_[rank].num_waits, 0);
}

std::map<std::string, std::size_t> FakeWorld::TakeCounts(std::size_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ranks_[rank].counts, {});
}

std::vector<std::vector<std::size_t>> FakeWorld::Aborted(std::size_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranks_[rank].aborted;
}

void FakeWorld::SetAsyncError(std::size_t rank, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].async_error = text;
}

Stream FakeWorld::MakeStream(std::size_t rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<FakeStream>());
  streams_.back()->rank = rank;
  return streams_.back().get();
}

void FakeWorld::Queue(Stream stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Enqueue(stream, [work] { return Operation{nullptr, work}; });
}

void FakeWorld::BeginCapture(Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  graphs_.push_back(std::make_unique<std::vector<std::function<void()>>>());
  graph_ = graphs_.back().get();
  captures_ = std::this_thread::get_id();
  invalidated_by_.clear();
  Of(stream)->is_captured = true;
}

std::function<void()> FakeWorld::EndCapture(Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& each : streams_) {
    if (each->rank == Of(stream)->rank) each->is_captured = false;
  }
  captures_ = std::thread::id();
  if (!invalidated_by_.empty()) throw std::runtime_error("the capture has been invalidated by " + invalidated_by_);
  return [this, graph = std::exchange(graph_, nullptr)] {
    const std::lock_guard<std::mutex> replaying(mutex_);
    for (const auto& step : *graph) step();
  };
}

void FakeWorld::MayFail(std::size_t rank, const char* name) {
  OfRank& counts = ranks_[rank];
  ++counts.counts[name];
  const std::size_t number = counts.num_calls++;
  if (number == counts.hang_at) {
    std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
    changed_.wait(lock, [&] { return counts.is_aborted; });
    lock.release();  // the caller's lock has it
    if (counts.hang_fails) throw std::runtime_error("aborted");
  }
  if (number == counts.fail_at) throw std::runtime_error("injected failure in " + std::string(name));
}

void FakeWorld::RefuseWhileCapturing(const char* name) {
  if (captures_ != std::this_thread::get_id()) return;
  invalidated_by_ = name;
  throw std::runtime_error(std::string(name) + ": operation not permitted when stream is capturing");
}

void FakeWorld::Enqueue(Stream stream, std::function<Operation()> make) {
  if (Of(stream)->is_captured) {
    graph_->push_back([this, stream, make] { Enqueue(stream, make); });
    return;
  }
  Of(stream)->queued.push_back(make());
  is_idle_ = false;
  changed_.notify_all();
}

void FakeWorld::RecordEvent(FakeEvent* event, Stream stream) {
  event->is_captured = Of(stream)->is_captured;
  if (event->is_captured) {
    graph_->push_back([this, event, stream] { RecordEvent(event, stream); });
    return;
  }
  event->is_done = std::make_shared<bool>(false);
  Enqueue(stream, [is_done = event->is_done] { return Operation{nullptr, [is_done] { *is_done = true; }}; });
}

void FakeWorld::WaitEvent(Stream stream, FakeEvent* event) {
  if (event->is_captured) Of(stream)->is_captured = true;  // the stream joins
  if (Of(stream)->is_captured) {
    if (!event->is_captured) throw std::runtime_error("a captured stream cannot wait for what is not in its graph");
    graph_->push_back([this, event, stream] {
      event->is_captured = false;
      WaitEvent(stream, event);
    });
    return;
  }
  if (event->is_done == nullptr) return;
  Enqueue(stream, [is_done = event->is_done] { return Operation{[is_done] { return *is_done; }, [] {}}; });
}

FakeWorld::FakeStream* FakeWorld::Choose() {
  if (steps_until_new_priorities_ == 0) {
    for (const auto& stream : streams_) stream->priority = 1 + random_.Next() / 2;
    if (!streams_.empty()) streams_[starved_stream_ % streams_.size()]->priority = 0;
    steps_until_new_priorities_ = 1 + random_.Below(40);
  }
  FakeStream* chosen = nullptr;
  for (const auto& stream : streams_) {
    if (stream->queued.empty() || (chosen != nullptr && chosen->priority >= stream->priority)) continue;
    const Operation& next = stream->queued.front();
    if (!next.is_ready || next.is_ready()) chosen = stream.get();
  }
  return chosen;
}

void FakeWorld::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_closing_) {
    FakeStream* stream = is_paused_ ? nullptr : Choose();
    if (stream == nullptr) {
      is_idle_ = !is_paused_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return is_closing_ || (!is_paused_ && !is_idle_); });
      continue;
    }
    --steps_until_new_priorities_;
    const Operation operation = std::move(stream->queued.front());
    stream->queued.pop_front();
    if (operation.is_kernel && ranks_[stream->rank].num_transfers_in_flight > 0) ++num_overlaps_;
    operation.run();
  }
}

class FakeDevice final : public Device {
 public:
  FakeDevice(FakeWorld* world, std::size_t rank) : world_(world), rank_(rank) {}

  Stream CreateStream() override {
    const auto lock = Call("CreateStream");
    world_->streams_.push_back(std::make_unique<FakeWorld::FakeStream>());
    world_->streams_.back()->rank = rank_;
    ++world_->num_alive_;
    return world_->streams_.back().get();
  }
  void DestroyStream(Stream /*stream*/) noexcept override {  // what is in it still runs
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    --world_->num_alive_;
  }
  Event CreateEvent() override {
    const auto lock = Call("CreateEvent");
    ++world_->num_alive_;
    return new FakeWorld::FakeEvent();
  }
  void DestroyEvent(Event event) noexcept override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    --world_->num_alive_;
    delete Of(event);
  }
  void Record(Event event, Stream stream) override {
    const auto lock = Call("Record");
    world_->RecordEvent(Of(event), stream);
  }
  void Wait(Stream stream, Event event) override {
    const auto lock = Call("Wait");
    FakeWorld::OfRank& counts = world_->ranks_[rank_];
    if (counts.num_waits++ != counts.forget_at) world_->WaitEvent(stream, Of(event));
  }
  bool IsDone(Event event) override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    world_->RefuseWhileCapturing("IsDone");
    if (Of(event)->is_captured) throw std::runtime_error("an event of a capture cannot be asked");
    return Of(event)->is_done == nullptr || *Of(event)->is_done;
  }
  bool IsCapturing(Stream stream) override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    return FakeWorld::Of(stream)->is_captured;
  }
  void* Allocate(std::size_t nbytes) override {
    const auto lock = Call("Allocate");
    world_->RefuseWhileCapturing("Allocate");
    ++world_->num_alive_;
    void* data = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
    std::memset(data, kGarbage, nbytes);
    return data;
  }
  void Free(void* data) noexcept override {
    {
      const std::lock_guard<std::mutex> lock(world_->mutex_);
      EXPECT(world_->captures_ != std::this_thread::get_id(), "Free on a thread that captures");
    }
    world_->Synchronize();
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    --world_->num_alive_;
    std::free(data);
  }
  void Copy(void* to, const void* from, std::size_t nbytes, Stream stream) override {
    const auto lock = Call("Copy");
    world_->Enqueue(stream, [=] { return FakeWorld::Operation{nullptr, [=] { std::memmove(to, from, nbytes); }}; });
  }

 private:
  static FakeWorld::FakeEvent* Of(Event event) { return static_cast<FakeWorld::FakeEvent*>(event); }
  std::unique_lock<std::mutex> Call(const char* name) {
    std::unique_lock<std::mutex> lock(world_->mutex_);
    world_->MayFail(rank_, name);
    return lock;
  }

  FakeWorld* world_;
  std::size_t rank_;
};

class FakeKernels final : public Kernels {
 public:
  FakeKernels(FakeWorld* world, std::size_t rank) : world_(world), rank_(rank) {}

  void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                const Expected& expected, Stream stream) override {
    Launch("Quantize", stream, [=] {
      zcomm::Quantize(layout, input, output, nullptr, 1);
      Clear(layout, expected, output);
    });
  }
  void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
              std::int32_t* is_valid, Stream stream) override {
    Launch("Decode", stream, [=] { Checked(is_valid, [&] { zcomm::Decode(layout, input, output, 1); }); });
  }
  void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
                 std::int32_t* is_valid, Stream stream) override {
    Launch("DecodeSum", stream,
           [=] { Checked(is_valid, [&] { zcomm::DecodeSum(layout, input, output, divisor, 1); }); });
  }
  void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                           const MutableMessages& output, const Expected& expected, std::int32_t* is_valid,
                           Stream stream) override {
    Launch("DecodeSumRequantize", stream, [=] {
      Clear(out_layout, expected, output);
      ClearTrailers(out_layout, output);
      Checked(is_valid, [&] { zcomm::DecodeSumRequantize(layout, input, out_layout, output, nullptr, 1); });
    });
  }

 private:
  void Launch(const char* name, Stream stream, const std::function<void()>& kernel) {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    world_->MayFail(rank_, name);
    world_->Enqueue(stream, [kernel] { return FakeWorld::Operation{nullptr, kernel, true}; });
  }

  FakeWorld* world_;
  std::size_t rank_;
};

class FakeTransport final : public Transport {
 public:
  FakeTransport(FakeWorld* world, int link, std::vector<std::size_t> ranks, std::size_t index)
      : world_(world),
        link_(link),
        ranks_(std::move(ranks)),
        index_(index),
        is_aborted_(std::make_shared<bool>(false)) {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    ++world_->num_alive_;
  }
  ~FakeTransport() override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    --world_->num_alive_;
  }

  std::size_t size() const override { return ranks_.size(); }
  std::size_t rank() const override { return index_; }

  void Gather(const void* send, void* receive, std::size_t stride_nbytes, std::size_t nbytes, Stream stream) override {
    const auto* own = static_cast<const std::uint8_t*>(send);
    auto* rows = static_cast<std::uint8_t*>(receive);
    Transfer(
        "Gather", stream, [=] { return std::vector<std::uint8_t>(own, own + nbytes); },
        [=] {
          for (std::size_t i = 0; i < size(); ++i) {
            if (rows + i * stride_nbytes != own) std::memset(rows + i * stride_nbytes, kGarbage, nbytes);
          }
        },
        [=](std::size_t i, const std::vector<std::uint8_t>& sent, std::size_t num_missing) {
          EXPECT(sent.size() == nbytes, "rank %zu sent %zu bytes for %zu", i, sent.size(), nbytes);
          std::memmove(rows + i * stride_nbytes, sent.data(), nbytes - (i == index_ ? 0 : num_missing));
        });
  }

  void Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                Stream stream) override {
    Transfer(
        "Exchange", stream,
        [=] {  // [ranks][repeats][nbytes]
          std::vector<std::uint8_t> sent;
          for (std::size_t i = 0; i < size(); ++i) {
            for (std::size_t r = 0; r < repeats; ++r) {
              const std::uint8_t* part = send.data + i * send.stride_nbytes + r * send.step_nbytes;
              sent.insert(sent.end(), part, part + nbytes);
            }
          }
          return sent;
        },
        [=] {
          for (std::size_t i = 0; i < size() * repeats; ++i) {
            std::memset(receive.data + i / repeats * receive.stride_nbytes + i % repeats * receive.step_nbytes,
                        kGarbage, nbytes);
          }
        },
        [=](std::size_t i, const std::vector<std::uint8_t>& sent, std::size_t num_missing) {
          EXPECT(sent.size() == size() * repeats * nbytes, "rank %zu sent %zu bytes", i, sent.size());
          for (std::size_t r = 0; r < repeats; ++r) {
            std::memcpy(receive.data + i * receive.stride_nbytes + r * receive.step_nbytes,
                        sent.data() + (index_ * repeats + r) * nbytes, nbytes - num_missing);
          }
        });
  }

  std::string AsyncError() override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    return world_->ranks_[ranks_[index_]].async_error;
  }
  void Abort() noexcept override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    *is_aborted_ = true;
    world_->ranks_[ranks_[index_]].is_aborted = true;
    world_->ranks_[ranks_[index_]].aborted.push_back(ranks_);
    world_->is_idle_ = false;
    world_->num_alive_ -= num_registrations_;
    num_registrations_ = 0;
    world_->changed_.notify_all();
  }
  void* Register(void* data, std::size_t /*nbytes*/) override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    world_->MayFail(ranks_[index_], "Register");
    ++world_->num_alive_;
    ++num_registrations_;
    return data;
  }
  void Deregister(void* /*registration*/) noexcept override {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    --world_->num_alive_;
    --num_registrations_;
  }

 private:
  // Two operations: the start, when the sent data are read and the receive buffer becomes garbage; and, once all ranks
  // have started, the end, when it is written.
  void Transfer(const char* name, Stream stream, const std::function<std::vector<std::uint8_t>()>& read,
                const std::function<void()>& overwrite,
                const std::function<void(std::size_t, const std::vector<std::uint8_t>&, std::size_t)>& write) {
    const std::lock_guard<std::mutex> lock(world_->mutex_);
    const std::size_t own = ranks_[index_];
    world_->MayFail(own, name);
    FakeWorld::OfRank& counts = world_->ranks_[own];
    const std::size_t num_missing = counts.num_transfers++ == counts.shorten_at ? kTrailerNbytes : 0;
    const auto number = std::make_shared<std::size_t>(0);
    FakeWorld* world = world_;
    world_->Enqueue(stream, [=, link = link_, started = &num_started_, aborted = is_aborted_] {
      const std::size_t at = *aborted ? 0 : (*started)++;
      *number = at;
      return FakeWorld::Operation{nullptr, [=] {
                                    ++world->ranks_[own].num_transfers_in_flight;
                                    if (*aborted) return;
                                    world->transfers_[{link, at}].sent[own] = read();
                                    if (num_missing == 0) overwrite();
                                  }};
    });
    world_->Enqueue(stream, [=, link = link_, ranks = ranks_, aborted = is_aborted_] {
      const std::size_t at = *number;
      return FakeWorld::Operation{[=] { return *aborted || world->transfers_[{link, at}].sent.size() == ranks.size(); },
                                  [=] {
                                    --world->ranks_[own].num_transfers_in_flight;
                                    if (*aborted) return;
                                    for (std::size_t i = 0; i < ranks.size(); ++i)
                                      write(i, world->transfers_[{link, at}].sent[ranks[i]], num_missing);
                                  }};
    });
  }

  FakeWorld* world_;
  int link_;
  std::vector<std::size_t> ranks_;
  std::size_t index_;
  std::size_t num_started_ = 0;
  std::size_t num_registrations_ = 0;
  std::shared_ptr<bool> is_aborted_;
};

std::shared_ptr<Device> FakeWorld::MakeDevice(std::size_t rank) { return std::make_shared<FakeDevice>(this, rank); }
std::shared_ptr<Kernels> FakeWorld::MakeKernels(std::size_t rank) { return std::make_shared<FakeKernels>(this, rank); }
std::unique_ptr<Transport> FakeWorld::MakeTransport(int link, const std::vector<std::size_t>& ranks,
                                                    std::size_t index) {
  return std::make_unique<FakeTransport>(this, link, ranks, index);
}

}  // namespace zcomm::nccl
