// The part of zcomm._native that calls NCCL: converts arguments, releases the GIL, and owns communicators. In builds
// without CUDA, communicators work only with the emulated NCCL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "communicator.h"
#include "cuda_device.h"
#include "host_device.h"
#include "host_stream.h"
#include "nccl_library.h"
#include "nccl_transport.h"
#include "single_rank.h"
#include "zcomm/check.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using zcomm::DType;
using zcomm::nccl::Library;

using zcomm::nccl::CallRows;
using zcomm::nccl::CallSizes;
using zcomm::nccl::Communicator;
using zcomm::nccl::HostEvent;
using zcomm::nccl::HostStream;

// codec, block, hash of a chunk's messages, hash of the last chunk's
using WireArgument = std::tuple<int, std::size_t, std::uint32_t, std::uint32_t>;
// numel, chunk_numel, wires
using SizesArgument = std::tuple<std::size_t, std::size_t, std::vector<WireArgument>>;
// dtype, address, local_stride, node_stride
using RowsArgument = std::tuple<int, std::uintptr_t, std::size_t, std::size_t>;
// stream, address of is_valid, address of the workspace, its bytes
using PlaceArgument = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t>;
// unique id (empty if there is one rank), number of ranks, this rank
using HopArgument = std::tuple<nb::bytes, std::size_t, std::size_t>;

// Owns a communicator until Close; afterwards it keeps only the error. Python objects that live on (work handles, the
// traceback of an error) hold this object. If they held the communicator itself, the last of them to be freed, in any
// thread at any time, would wait in its destructor for everything that is queued.
class ClosableCommunicator {
 public:
  explicit ClosableCommunicator(std::shared_ptr<Communicator> made) : made_(std::move(made)) {}
  // Python calls it with the GIL held. The communicator's destructor waits for its calls, up to the timeout, and other
  // threads must run meanwhile.
  ~ClosableCommunicator() {
    const nb::gil_scoped_release released;
    made_ = nullptr;
  }
  ClosableCommunicator(const ClosableCommunicator&) = delete;
  ClosableCommunicator& operator=(const ClosableCommunicator&) = delete;

  std::shared_ptr<Communicator> Get() const {
    const auto [made, failure] = Now();
    if (made == nullptr) throw std::runtime_error(failure.empty() ? "the communicator is closed" : failure);
    return made;
  }
  void Check() const {
    const auto [made, failure] = Now();
    if (made != nullptr) return made->Check();
    if (!failure.empty()) throw std::runtime_error(failure);
  }
  void Abort(const std::string& reason) const {
    const auto [made, failure] = Now();
    if (made != nullptr) made->Abort(reason);
  }
  void Close() {
    const auto [made, before] = Now();
    if (made == nullptr) return;
    // Without the lock: Finish may wait, and Abort, which takes the lock, must be able to end the wait.
    const std::string failure = made->Finish();
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = failure;
    made_ = nullptr;
  }

 private:
  std::pair<std::shared_ptr<Communicator>, std::string> Now() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {made_, failure_};
  }

  mutable std::mutex mutex_;  // Close, in one thread, against calls in others
  std::shared_ptr<Communicator> made_;
  std::string failure_;
};

std::uint8_t* Address(std::uintptr_t address) { return reinterpret_cast<std::uint8_t*>(address); }

DType MakeDType(int dtype) {
  ZCOMM_CHECK(dtype >= 0 && dtype < static_cast<int>(zcomm::kNumDTypes), "unknown dtype id: dtype=", dtype);
  return static_cast<DType>(dtype);
}

CallSizes MakeSizes(const SizesArgument& argument) {
  CallSizes sizes{std::get<0>(argument), std::get<1>(argument), {}};
  for (const auto& [codec, block, hash, last_hash] : std::get<2>(argument)) {
    ZCOMM_CHECK(zcomm::IsCodec(codec), "unknown codec id: codec=", codec);
    sizes.wires.push_back({static_cast<zcomm::Codec>(codec), block, {hash, last_hash}});
  }
  return sizes;
}

CallRows MakeRows(const RowsArgument& argument) {
  const auto& [dtype, address, local_stride, node_stride] = argument;
  return {MakeDType(dtype), Address(address), local_stride, node_stride};
}

zcomm::nccl::GatherCall MakeGather(const SizesArgument& sizes, const RowsArgument& input, const RowsArgument& output) {
  const CallRows shard = MakeRows(input);
  return {MakeSizes(sizes), shard.dtype, shard.data, MakeRows(output)};
}

zcomm::nccl::ReduceCall MakeReduce(const SizesArgument& sizes, const RowsArgument& input, const RowsArgument& output,
                                   float divisor) {
  const CallRows shard = MakeRows(output);
  return {MakeSizes(sizes), MakeRows(input), shard.dtype, shard.data, divisor};
}

zcomm::nccl::ExchangeCall MakeExchange(const SizesArgument& sizes, const RowsArgument& input,
                                       const RowsArgument& output) {
  return {MakeSizes(sizes), MakeRows(input), MakeRows(output)};
}

// Runs the call; without a place, returns the bytes of workspace that the call needs when it is captured.
template <class Call>
std::size_t RunOrMeasure(Communicator* communicator, const Call& call, const std::optional<PlaceArgument>& place) {
  if (!place.has_value()) return communicator->WorkspaceNbytes(call);
  const auto& [stream, is_valid, workspace, workspace_nbytes] = *place;
  communicator->Run(call,
                    {Address(stream), reinterpret_cast<std::int32_t*>(is_valid), Address(workspace), workspace_nbytes});
  return 0;
}

std::pair<std::shared_ptr<zcomm::nccl::Device>, std::shared_ptr<zcomm::nccl::Kernels>> MakeDevice(
    const Library& library, [[maybe_unused]] int device) {
  if (library.is_emulated) return {zcomm::nccl::MakeHostDevice(), zcomm::nccl::MakeHostKernels()};
#ifdef ZCOMM_HAS_CUDA
  return {zcomm::nccl::MakeCudaDevice(device, &library), zcomm::nccl::MakeCudaKernels()};
#else
  throw std::runtime_error("the native module was built without CUDA");
#endif
}

void MakeCommunicator(ClosableCommunicator* self, const Library& library, int device,
                      const std::vector<HopArgument>& hops, double timeout_s) {
  using Seconds = std::chrono::duration<double>;
  std::vector<std::tuple<zcomm::nccl::UniqueId, std::size_t, std::size_t>> parsed;
  for (const auto& [bytes, size, rank] : hops) {
    ZCOMM_CHECK(size == 1 || bytes.size() == zcomm::nccl::kUniqueIdNbytes,
                "a unique id must have 128 bytes: nbytes=", bytes.size());
    zcomm::nccl::UniqueId id{};
    std::memcpy(id.internal, bytes.c_str(), bytes.size());
    parsed.emplace_back(id, size, rank);
  }
  // Connecting waits for the other ranks, up to the timeout; other Python threads must run meanwhile.
  const nb::gil_scoped_release released;
  auto [place, operations] = MakeDevice(library, device);
  std::vector<std::unique_ptr<zcomm::nccl::Transport>> transports;
  for (const auto& [id, size, rank] : parsed) {
    if (size == 1) {
      transports.push_back(std::make_unique<zcomm::nccl::SingleRank>(place.get()));
    } else {
      transports.push_back(std::make_unique<zcomm::nccl::NcclTransport>(&library, id, size, rank, Seconds(timeout_s),
                                                                        [gpu = place] { gpu->MakeCurrent(); }));
    }
  }
  new (self) ClosableCommunicator(std::make_shared<Communicator>(std::move(place), std::move(operations),
                                                                 std::move(transports), Seconds(timeout_s)));
}

void DefineCommunicator(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("nccl_unique_id", [](const Library& library) {
    const zcomm::nccl::UniqueId id = zcomm::nccl::MakeUniqueId(library);
    return nb::bytes(id.internal, sizeof(id.internal));
  });
  nb::class_<ClosableCommunicator>(m, "NcclCommunicator")
      .def("__init__", &MakeCommunicator, "library"_a, "device"_a, "hops"_a, "timeout_s"_a, nb::keep_alive<1, 2>())
      .def(
          "all_gather",
          [](ClosableCommunicator& self, const SizesArgument& sizes, const RowsArgument& input,
             const RowsArgument& output, const std::optional<PlaceArgument>& place) {
            return RunOrMeasure(self.Get().get(), MakeGather(sizes, input, output), place);
          },
          release, "sizes"_a, "input"_a, "output"_a, "place"_a.none())
      .def(
          "reduce_scatter",
          [](ClosableCommunicator& self, const SizesArgument& sizes, const RowsArgument& input,
             const RowsArgument& output, float divisor, const std::optional<PlaceArgument>& place) {
            return RunOrMeasure(self.Get().get(), MakeReduce(sizes, input, output, divisor), place);
          },
          release, "sizes"_a, "input"_a, "output"_a, "divisor"_a, "place"_a.none())
      .def(
          "all_to_all",
          [](ClosableCommunicator& self, const SizesArgument& sizes, const RowsArgument& input,
             const RowsArgument& output, const std::optional<PlaceArgument>& place) {
            return RunOrMeasure(self.Get().get(), MakeExchange(sizes, input, output), place);
          },
          release, "sizes"_a, "input"_a, "output"_a, "place"_a.none())
      .def(
          "exchange_bytes",
          [](ClosableCommunicator& self, std::size_t hop, bool is_gather, std::uintptr_t input, std::uintptr_t output,
             std::size_t stride_nbytes, std::size_t nbytes, std::uintptr_t stream) {
            const zcomm::nccl::BytesCall call{hop, is_gather, Address(input), Address(output), stride_nbytes, nbytes};
            self.Get()->Run(call, {Address(stream), nullptr, nullptr, 0});
          },
          release, "hop"_a, "is_gather"_a, "input"_a, "output"_a, "stride_nbytes"_a, "nbytes"_a, "stream"_a)
      .def("check", &ClosableCommunicator::Check, release)
      .def("abort", &ClosableCommunicator::Abort, release, "reason"_a)
      .def("close", &ClosableCommunicator::Close, release);
}

void DefineHostStream(nb::module_& m) {
  nb::class_<HostEvent>(m, "HostEvent")
      .def("is_done", &HostEvent::IsDone)
      .def("wait", &HostEvent::Wait, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<HostStream>(m, "HostStream")
      .def(nb::init<>())
      .def_prop_ro("address", [](HostStream& self) { return reinterpret_cast<std::uintptr_t>(self.handle()); })
      .def("record", [](HostStream& self) {
        HostEvent event;
        event.Record(&self);
        return event;
      });
}

}  // namespace

void DefineNccl(nb::module_& m) {
  nb::class_<Library>(m, "NcclLibrary")
      .def_ro("path", &Library::path)
      .def_prop_ro("version", [](const Library& self) { return zcomm::nccl::VersionText(self.version); })
      .def_prop_ro("can_register", &Library::can_register)
      .def_ro("is_emulated", &Library::is_emulated);
  m.def("load_nccl", &zcomm::nccl::LoadLibrary, nb::call_guard<nb::gil_scoped_release>(), "path"_a, "candidates"_a);
  DefineCommunicator(m);
  DefineHostStream(m);
}
