// The emulated NCCL between threads that stand in for processes, under the real transport: what arrives, in which
// order, and which errors the other ranks see. With the host's kernels, whole collectives, too.

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "communicator.h"
#include "host_device.h"
#include "host_stream.h"
#include "nccl_library.h"
#include "nccl_transport.h"
#include "test_util.h"

namespace zcomm::nccl {
namespace {

constexpr std::size_t kRanks = 3;
constexpr std::size_t kLarge = 1 << 20;  // more than a socket holds
using Bytes = std::vector<std::uint8_t>;

// Calls `check(transport, rank, stream)` on all ranks at once.
template <class Check>
void OnRanks(const Library& library, const Check& check) {
  const UniqueId id = MakeUniqueId(library);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      HostStream stream;
      NcclTransport transport(&library, id, kRanks, rank, std::chrono::seconds(60));
      check(&transport, rank, &stream);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

void WaitFor(HostStream* stream) {
  HostEvent end;
  end.Record(stream);
  end.Wait();
}

// The error of `call`, thrown at once or reported while it is in flight.
template <class Call>
std::string ErrorOf(Transport* transport, const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  for (;;) {
    std::string error = transport->AsyncError();
    if (!error.empty()) return error;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The bytes that rank `from` sends to rank `to`; each identifies its place.
Bytes Sent(std::size_t from, std::size_t to, std::size_t nbytes) {
  Bytes bytes(nbytes);
  std::iota(bytes.begin(), bytes.end(), static_cast<std::uint8_t>(50 * from + 7 * to));
  return bytes;
}

void TestExchanges(const Library& library) {
  OnRanks(library, [](Transport* transport, std::size_t rank, HostStream* stream) {
    const Bytes own = Sent(rank, 0, kLarge);
    Bytes rows(kRanks * kLarge);
    transport->Gather(own.data(), rows.data(), kLarge, kLarge, stream->handle());
    Bytes sends;
    Bytes received(kRanks * 1000);
    for (std::size_t to = 0; to < kRanks; ++to) {
      const Bytes part = Sent(rank, to, 1000);
      sends.insert(sends.end(), part.begin(), part.end());
    }
    // Two repeats of 500 bytes each, of every part.
    transport->Exchange({sends.data(), 1000, 500}, {received.data(), 1000, 500}, 500, 2, stream->handle());
    WaitFor(stream);
    for (std::size_t from = 0; from < kRanks; ++from) {
      const Bytes row = Sent(from, 0, kLarge);
      EXPECT(std::equal(row.begin(), row.end(), rows.begin() + from * kLarge), "gathered from rank %zu", from);
      const Bytes part = Sent(from, rank, 1000);
      EXPECT(std::equal(part.begin(), part.end(), received.begin() + from * 1000), "exchanged with rank %zu", from);
    }
    EXPECT(transport->AsyncError().empty(), "no error");
  });
}

// Two streams of one communicator, not ordered by events: the exchanges still run in the order of the calls.
void TestOrderOverStreams(const Library& library) {
  OnRanks(library, [](Transport* transport, std::size_t rank, HostStream* stream) {
    HostStream late;
    late.Queue([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    std::uint8_t first[kRanks];
    std::uint8_t second[kRanks];
    const std::uint8_t own[2] = {static_cast<std::uint8_t>(rank), static_cast<std::uint8_t>(10 + rank)};
    transport->Gather(own, first, 1, 1, late.handle());
    transport->Gather(own + 1, second, 1, 1, stream->handle());
    WaitFor(stream);
    for (std::size_t from = 0; from < kRanks; ++from) {
      EXPECT(first[from] == from && second[from] == 10 + from, "from rank %zu", from);
    }
    WaitFor(&late);
  });
}

void TestErrors(const Library& library) {
  OnRanks(library, [](Transport* transport, std::size_t rank, HostStream* stream) {
    const std::size_t nbytes = rank == 0 ? 8 : 12;
    Bytes own(nbytes);
    Bytes rows(kRanks * nbytes);
    const std::string error =
        ErrorOf(transport, [&] { transport->Gather(own.data(), rows.data(), nbytes, nbytes, stream->handle()); });
    const bool is_named = Contains(
        error, rank == 0 ? "sends 12 bytes where this rank expects 8" : "sends 8 bytes where this rank expects 12");
    EXPECT(is_named || Contains(error, "disconnected"), "%s", error.c_str());
    transport->Abort();
    WaitFor(stream);
  });
  OnRanks(library, [](Transport* transport, std::size_t rank, HostStream* stream) {
    if (rank == 2) return transport->Abort();
    std::uint8_t own = 1;
    std::uint8_t rows[kRanks];
    const std::string error = ErrorOf(transport, [&] { transport->Gather(&own, rows, 1, 1, stream->handle()); });
    EXPECT(Contains(error, "disconnected"), "%s", error.c_str());
    transport->Abort();
    WaitFor(stream);  // an exchange that failed returns only after an abort
  });
}

void TestEvents() {
  const std::shared_ptr<Device> device = MakeHostDevice();
  const Stream first = device->CreateStream();
  const Stream second = device->CreateStream();
  const Event event = device->CreateEvent();
  EXPECT(device->IsDone(event), "never recorded");
  std::atomic<bool> may_go{false};
  std::uint8_t values[2] = {1, 0};
  static_cast<WorkStream*>(first)->Queue([&] {
    while (!may_go) std::this_thread::yield();
    values[0] = 5;
  });
  device->Record(event, first);
  device->Wait(second, event);
  device->Copy(values + 1, values, 1, second);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // enough for a copy that does not wait
  EXPECT(!device->IsDone(event), "its stream still works");
  may_go = true;
  void* data = device->Allocate(1);
  device->Free(data);  // waits for the device
  EXPECT(device->IsDone(event) && values[1] == 5, "the copy came after the event: %d", values[1]);
  device->DestroyEvent(event);
  device->DestroyStream(first);
  device->DestroyStream(second);
}

// A hop whose exchange number `at`, from 0, brings a message with a damaged trailer from its first rank.
class DamagedHop final : public Transport {
 public:
  DamagedHop(std::unique_ptr<Transport> hop, std::size_t at) : hop_(std::move(hop)), at_(at) {}

  std::size_t size() const override { return hop_->size(); }
  std::size_t rank() const override { return hop_->rank(); }
  void Gather(const void* send, void* receive, std::size_t stride_nbytes, std::size_t nbytes, Stream stream) override {
    hop_->Gather(send, receive, stride_nbytes, nbytes, stream);
  }
  void Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                Stream stream) override {
    hop_->Exchange(send, receive, nbytes, repeats, stream);
    if (number_++ != at_) return;
    static_cast<WorkStream*>(stream)->Queue([=] { receive.data[nbytes - 8] ^= 1; });
  }
  std::string AsyncError() override { return hop_->AsyncError(); }
  void Abort() noexcept override { hop_->Abort(); }
  void* Register(void* data, std::size_t nbytes) override { return hop_->Register(data, nbytes); }
  void Deregister(void* registration) noexcept override { hop_->Deregister(registration); }

 private:
  std::unique_ptr<Transport> hop_;
  std::size_t at_;
  std::size_t number_ = 0;
};

// Two reductions over 2 nodes x 2 ranks. In the second, rank 0 receives a damaged message in exchange `at` of hop 1.
// The ranks whose sum includes it, rank 0 and its peer in the other node, must refuse; the others get the mean. The
// buffer that rank 0 sends from holds a valid message of the first call.
void TestWhatIsMadeOfADamagedMessage(const Library& library, std::size_t at) {
  constexpr std::size_t kNumel = 600;
  constexpr std::size_t kChunk = 256;
  constexpr std::size_t kChunks = 3;
  const std::vector<Wire> wires = {{Codec::kInt8, 256, {11, 12}}, {Codec::kInt8, 128, {21, 22}}};
  const std::vector<UniqueId> inside = {MakeUniqueId(library), MakeUniqueId(library)};
  const std::vector<UniqueId> between = {MakeUniqueId(library), MakeUniqueId(library)};
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto join = [&](const UniqueId& id, std::size_t index) {
        return std::make_unique<NcclTransport>(&library, id, 2, index, std::chrono::seconds(60));
      };
      std::vector<std::unique_ptr<Transport>> hops;
      hops.push_back(
          std::make_unique<DamagedHop>(join(inside[rank / 2], rank % 2), rank == 0 ? kChunks + at : SIZE_MAX));
      hops.push_back(join(between[rank % 2], rank / 2));
      HostStream stream;
      Communicator communicator(MakeHostDevice(), MakeHostKernels(), std::move(hops), std::chrono::seconds(60));
      for (const float unit : {1.0F, 8.0F}) {
        std::vector<float> input(4 * kNumel, unit * static_cast<float>(rank + 1));
        std::vector<float> output(kNumel);
        std::int32_t is_valid = 1;
        const CallRows rows{DType::kFloat32, reinterpret_cast<std::uint8_t*>(input.data()), kNumel, 2 * kNumel};
        communicator.Run(
            ReduceCall{
                {kNumel, kChunk, wires}, rows, DType::kFloat32, reinterpret_cast<std::uint8_t*>(output.data()), 4.0F},
            {stream.handle(), &is_valid, nullptr, 0});
        WaitFor(&stream);
        const bool is_hit = unit != 1.0F && rank % 2 == 0;
        EXPECT((is_valid == 0) == is_hit, "chunk %zu: rank %zu, flag %d", at, rank, is_valid);
        for (std::size_t i = 0; i < kNumel && is_valid != 0; ++i) {
          // the mean of 1 to 4; each of two roundings is by half of a scale, of 4 / 127 and of 7 / 127, at most
          EXPECT(std::abs(output[i] - 2.5F * unit) < 0.1F * unit, "rank %zu: element %zu is %f", rank, i, output[i]);
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace zcomm::nccl

int main() {
  using namespace zcomm::nccl;
  const Library library = LoadLibrary(EMULATED_NCCL, {});
  EXPECT(library.is_emulated, "it says so");
  TestEvents();
  TestExchanges(library);
  TestOrderOverStreams(library);
  TestErrors(library);
  for (const std::size_t chunk : {0, 1, 2}) TestWhatIsMadeOfADamagedMessage(library, chunk);
  return 0;
}
