// An emulated NCCL for tests, between processes of one machine and in host memory. It exports the functions that
// nccl_library.cc resolves, and zcommNcclIsEmulated, which tells that streams are those of host_stream.h. Only
// DataType::kUint8 is supported.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host_stream.h"
#include "nccl_api.h"
#include "network.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using zcomm::emulated::Exchange;
using zcomm::emulated::Network;
using zcomm::emulated::Part;
using zcomm::nccl::Comm;
using zcomm::nccl::Config;
using zcomm::nccl::DataType;
using zcomm::nccl::Result;
using zcomm::nccl::Stream;
using zcomm::nccl::UniqueId;
using zcomm::nccl::WorkStream;

constexpr int kVersion = 22907;  // the NCCL version that it imitates
constexpr std::align_val_t kAlignment{256};

struct Communicator {
  std::shared_ptr<Network> network;  // shared with queued exchanges, which may outlive an aborted communicator
  std::size_t size;
  std::size_t rank;
  bool is_blocking;
  std::string name;
  bool is_finalized = false;
  std::size_t num_splits = 0;
  std::shared_ptr<Network> split{};  // the last split, whose progress is reported by its parent, as NCCL does
};

// The calls of a thread since ncclGroupStart, by communicator and stream. Thread-local, as NCCL's groups are.
struct Queued {
  Communicator* comm;
  Stream stream;
  Exchange exchange;
};
struct Group {
  int depth = 0;
  Result failed = Result::kSuccess;
  std::vector<Queued> calls;
};
thread_local Group group;

Communicator* Of(Comm comm) { return static_cast<Communicator*>(comm); }

Exchange* ExchangeOn(Communicator* comm, Stream stream) {
  for (Queued& queued : group.calls) {
    if (queued.comm == comm && queued.stream == stream) return &queued.exchange;
  }
  group.calls.push_back({comm, stream, {}});
  Exchange& exchange = group.calls.back().exchange;
  exchange.sends.resize(comm->size);
  exchange.receives.resize(comm->size);
  return &exchange;
}

Result Fail(Result result) {
  if (group.depth > 0) group.failed = result;
  return result;
}

bool IsCallable(DataType type, Comm comm, Stream stream) {
  return type == DataType::kUint8 && comm != nullptr && stream != nullptr && !Of(comm)->is_finalized;
}

}  // namespace

EXPORTED int zcommNcclIsEmulated() { return 1; }

EXPORTED Result ncclGetVersion(int* version) {
  *version = kVersion;
  return Result::kSuccess;
}

EXPORTED Result ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "%08x%08x%08x%08x", random(), random(), random(), random());
  return Result::kSuccess;
}

EXPORTED const char* ncclGetErrorString(Result result) {
  switch (result) {
    case Result::kSuccess:
      return "no error";
    case Result::kUnhandledCudaError:
      return "unhandled cuda error";
    case Result::kSystemError:
      return "unhandled system error";
    case Result::kInternalError:
      return "internal error";
    case Result::kInvalidArgument:
      return "invalid argument";
    case Result::kInvalidUsage:
      return "invalid usage";
    case Result::kRemoteError:
      return "remote process exited or there was a network error";
    case Result::kInProgress:
      return "operation in progress";
  }
  return "unknown result code";
}

EXPORTED const char* ncclGetLastError(Comm comm) {
  thread_local std::string text;  // the caller reads the pointer after this returns; another thread must not change it
  text = comm == nullptr ? "" : Of(comm)->network->error();
  return text.c_str();
}

EXPORTED Result ncclCommInitRankConfig(Comm* comm, int num_ranks, UniqueId id, int rank, Config* config) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) return Result::kInvalidArgument;
  const auto size = static_cast<std::size_t>(num_ranks);
  const std::string name(id.internal);
  auto network = std::make_shared<Network>(name, size, static_cast<std::size_t>(rank));
  auto* made = new Communicator{std::move(network), size, static_cast<std::size_t>(rank), config->blocking != 0, name};
  *comm = made;
  if (!made->is_blocking) return Result::kInProgress;
  while (!made->network->Connect()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return made->network->state();
}

// Supports only splits with the same ranks: color 0, and the rank as key.
EXPORTED Result ncclCommSplit(Comm comm, int color, int key, Comm* split, Config* config) {
  Communicator* parent = Of(comm);
  if (color != 0 || key != static_cast<int>(parent->rank) || parent->is_blocking) return Result::kInvalidArgument;
  const std::string name = parent->name + "-" + std::to_string(++parent->num_splits);
  parent->split = std::make_shared<Network>(name, parent->size, parent->rank);
  *split = new Communicator{parent->split, parent->size, parent->rank, config->blocking != 0, name};
  return config->blocking != 0 ? Result::kSuccess : Result::kInProgress;  // as of NCCL 2.28, while it is in progress
}

EXPORTED Result ncclCommGetAsyncError(Comm comm, Result* result) {
  if (comm == nullptr) return Result::kInvalidArgument;
  Network& network = *Of(comm)->network;
  bool is_in_progress = !network.Connect() || (Of(comm)->is_finalized && !network.is_idle());
  *result = network.state();
  if (Of(comm)->split != nullptr && *result == Result::kSuccess) {
    is_in_progress = !Of(comm)->split->Connect() || is_in_progress;
    *result = Of(comm)->split->state();
  }
  if (*result == Result::kSuccess && is_in_progress) *result = Result::kInProgress;
  return Result::kSuccess;
}

EXPORTED Result ncclCommFinalize(Comm comm) {
  Result state = Result::kSuccess;
  ncclCommGetAsyncError(comm, &state);
  if (!Of(comm)->is_blocking && state == Result::kInProgress) return Result::kInvalidArgument;
  Of(comm)->is_finalized = true;
  if (!Of(comm)->is_blocking) return Result::kInProgress;
  while (!Of(comm)->network->is_idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return Of(comm)->network->state();
}

EXPORTED Result ncclCommAbort(Comm comm) {
  Of(comm)->network->Abort();
  delete Of(comm);
  return Result::kSuccess;
}

EXPORTED Result ncclCommDestroy(Comm comm) { return ncclCommAbort(comm); }

EXPORTED Result ncclGroupStart() {
  ++group.depth;
  return Result::kSuccess;
}

EXPORTED Result ncclGroupEnd() {
  if (group.depth == 0) return Result::kInvalidUsage;
  if (--group.depth > 0) return Result::kSuccess;
  Group ended = std::exchange(group, {});
  if (ended.failed != Result::kSuccess) return ended.failed;
  bool is_blocking = true;
  for (Queued& queued : ended.calls) {
    const std::shared_ptr<Network> network = queued.comm->network;
    const std::size_t number = network->NextNumber();  // taken now: exchanges must run in the order of the calls
    const auto exchange = std::make_shared<Exchange>(std::move(queued.exchange));
    static_cast<WorkStream*>(queued.stream)->Queue([network, number, exchange] {
      network->Run(number, std::move(*exchange));
    });
    is_blocking = is_blocking && queued.comm->is_blocking;
  }
  return is_blocking ? Result::kSuccess : Result::kInProgress;
}

EXPORTED Result ncclSend(const void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream) {
  if (!IsCallable(type, comm, stream) || peer < 0 || static_cast<std::size_t>(peer) >= Of(comm)->size) {
    return Fail(Result::kInvalidArgument);
  }
  ncclGroupStart();
  auto* bytes = static_cast<std::uint8_t*>(const_cast<void*>(data));
  ExchangeOn(Of(comm), stream)->sends[static_cast<std::size_t>(peer)].push_back({bytes, count});
  return ncclGroupEnd();
}

EXPORTED Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm comm, Stream stream) {
  if (!IsCallable(type, comm, stream) || peer < 0 || static_cast<std::size_t>(peer) >= Of(comm)->size) {
    return Fail(Result::kInvalidArgument);
  }
  ncclGroupStart();
  auto* bytes = static_cast<std::uint8_t*>(data);
  ExchangeOn(Of(comm), stream)->receives[static_cast<std::size_t>(peer)].push_back({bytes, count});
  return ncclGroupEnd();
}

EXPORTED Result ncclAllGather(const void* send, void* receive, std::size_t count, DataType type, Comm comm,
                              Stream stream) {
  if (!IsCallable(type, comm, stream)) return Fail(Result::kInvalidArgument);
  ncclGroupStart();
  auto* rows = static_cast<std::uint8_t*>(receive);
  for (std::size_t peer = 0; peer < Of(comm)->size; ++peer) {
    if (peer == Of(comm)->rank && rows + peer * count == send) continue;  // already in place
    ncclSend(send, count, type, static_cast<int>(peer), comm, stream);
    ncclRecv(rows + peer * count, count, type, static_cast<int>(peer), comm, stream);
  }
  return ncclGroupEnd();
}

EXPORTED Result ncclMemAlloc(void** data, std::size_t nbytes) {
  *data = ::operator new(nbytes, kAlignment, std::nothrow);
  return *data == nullptr ? Result::kSystemError : Result::kSuccess;
}

EXPORTED Result ncclMemFree(void* data) {
  ::operator delete(data, kAlignment);
  return Result::kSuccess;
}

EXPORTED Result ncclCommRegister(Comm comm, void* data, std::size_t nbytes, void** registration) {
  if (comm == nullptr || data == nullptr || nbytes == 0) return Result::kInvalidArgument;
  *registration = data;
  return Result::kSuccess;
}

EXPORTED Result ncclCommDeregister(Comm comm, void* registration) {
  return comm == nullptr || registration == nullptr ? Result::kInvalidArgument : Result::kSuccess;
}
