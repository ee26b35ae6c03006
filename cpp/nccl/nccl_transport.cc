#include "nccl_transport.h"

#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

namespace zcomm::nccl {
namespace {

constexpr auto kSpinFor = std::chrono::microseconds(200);
constexpr auto kPollInterval = std::chrono::microseconds(20);  // after that

bool IsFine(Result result) { return result == Result::kSuccess || result == Result::kInProgress; }

}  // namespace

UniqueId MakeUniqueId(const Library& library) {
  UniqueId id;
  const Result result = library.functions.get_unique_id(&id);
  if (result != Result::kSuccess) {
    throw std::runtime_error(std::string("ncclGetUniqueId: ") + library.functions.get_error_string(result));
  }
  return id;
}

NcclTransport::NcclTransport(const Library* library, const UniqueId& id, std::size_t size, std::size_t rank,
                             std::chrono::duration<double> timeout, std::function<void()> enter)
    : nccl_(library->functions), size_(size), rank_(rank), timeout_(timeout), enter_(std::move(enter)) {
  try {
    Join(id);
    if (nccl_.comm_split != nullptr) SplitOff();
    comm_ = std::exchange(joined_, nullptr);
  } catch (...) {
    if (joined_ != nullptr) nccl_.comm_abort(joined_);
    if (split_ != nullptr) nccl_.comm_abort(split_);
    throw;
  }
}

void NcclTransport::Join(const UniqueId& id) {
  Config config;
  config.blocking = 0;
  const int size = static_cast<int>(size_);
  const Result result = nccl_.comm_init_rank_config(&joined_, size, id, static_cast<int>(rank_), &config);
  WaitUntilReady(joined_, result, "ncclCommInitRankConfig");
}

// The second communicator has its own config (blocking). The split is complete when the first one says so. Only then
// may the first be finalized and destroyed.
void NcclTransport::SplitOff() {
  Config config;
  config.blocking = 1;
  WaitUntilReady(joined_, nccl_.comm_split(joined_, 0, static_cast<int>(rank_), &split_, &config), "ncclCommSplit");
  WaitUntilReady(joined_, nccl_.comm_finalize(joined_), "ncclCommFinalize");
  nccl_.comm_destroy(joined_);
  joined_ = std::exchange(split_, nullptr);
}

NcclTransport::~NcclTransport() {
  const Comm comm = comm_;
  if (comm == nullptr) return;
  try {
    WaitUntilComplete(RunWithTimeout([nccl = nccl_, comm] { return nccl.comm_finalize(comm); }, "ncclCommFinalize"),
                      "ncclCommFinalize");
    RunWithTimeout([nccl = nccl_, comm] { return nccl.comm_destroy(comm); }, "ncclCommDestroy");
  } catch (const std::exception&) {  // other ranks may have died: destroying waits for them, aborting does not
    Abort();
  }
}

void NcclTransport::Gather(const void* send, void* receive, std::size_t stride_nbytes, std::size_t nbytes,
                           Stream stream) {
  if (stride_nbytes == nbytes) {
    return WaitUntilComplete(nccl_.all_gather(send, receive, nbytes, DataType::kUint8, comm_, stream), "ncclAllGather");
  }
  auto* rows = static_cast<std::uint8_t*>(receive);
  InGroup("ncclSend and ncclRecv", [&](const auto& check) {
    for (std::size_t i = 0; i < size_; ++i) {
      if (i == rank_ && rows + i * stride_nbytes == send) continue;  // already in place
      check(nccl_.send(send, nbytes, DataType::kUint8, static_cast<int>(i), comm_, stream));
      check(nccl_.recv(rows + i * stride_nbytes, nbytes, DataType::kUint8, static_cast<int>(i), comm_, stream));
    }
  });
}

void NcclTransport::Exchange(const Parts& send, const Parts& receive, std::size_t nbytes, std::size_t repeats,
                             Stream stream) {
  InGroup("ncclSend and ncclRecv", [&](const auto& check) {
    for (std::size_t i = 0; i < size_; ++i) {
      for (std::size_t r = 0; r < repeats; ++r) {
        const std::uint8_t* sent = send.data + i * send.stride_nbytes + r * send.step_nbytes;
        std::uint8_t* received = receive.data + i * receive.stride_nbytes + r * receive.step_nbytes;
        check(nccl_.send(sent, nbytes, DataType::kUint8, static_cast<int>(i), comm_, stream));
        check(nccl_.recv(received, nbytes, DataType::kUint8, static_cast<int>(i), comm_, stream));
      }
    }
  });
}

// Groups sends and receives: outside a group, each would wait for its peer, and two ranks that send to each other first
// would deadlock. The group is ended even after an error: it belongs to the thread, whose next NCCL call would
// otherwise be added to it and never start.
template <class Call>
void NcclTransport::InGroup(const char* name, const Call& call) {
  WaitUntilComplete(nccl_.group_start(), "ncclGroupStart");
  Result failed = Result::kSuccess;
  call([&](Result result) {
    if (IsFine(failed) && !IsFine(result)) failed = result;
  });
  const Result ended = nccl_.group_end();
  if (!IsFine(failed)) throw std::runtime_error(Text(failed, name));
  WaitUntilComplete(ended, "ncclGroupEnd");
}

std::string NcclTransport::AsyncError() {
  const Comm comm = comm_;
  if (comm == nullptr) return "";
  Result state = Result::kSuccess;
  const Result result = nccl_.comm_get_async_error(comm, &state);
  if (result != Result::kSuccess) return Text(result, "ncclCommGetAsyncError");
  return IsFine(state) ? "" : Text(state, "NCCL");
}

void NcclTransport::Abort() noexcept {
  const Comm comm = comm_.exchange(nullptr);
  if (comm != nullptr) nccl_.comm_abort(comm);
}

void* NcclTransport::Register(void* data, std::size_t nbytes) {
  if (nccl_.comm_register == nullptr) return nullptr;
  void* registration = nullptr;
  WaitUntilComplete(nccl_.comm_register(comm_, data, nbytes, &registration), "ncclCommRegister");
  return registration;
}

void NcclTransport::Deregister(void* registration) noexcept {
  const Comm comm = comm_;
  if (comm != nullptr) nccl_.comm_deregister(comm, registration);
}

void NcclTransport::WaitUntilReady(Comm nonblocking, Result result, const char* call) {
  WaitUntilComplete(nonblocking, result == Result::kSuccess ? Result::kInProgress : result, call);
}

void NcclTransport::WaitUntilComplete(Comm comm, Result result, const char* call) {
  const auto begin = std::chrono::steady_clock::now();
  while (result == Result::kInProgress) {
    Result state = Result::kSuccess;
    result = nccl_.comm_get_async_error(comm, &state);
    if (result == Result::kSuccess) result = state;
    if (result != Result::kInProgress) break;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (waited > timeout_) throw std::runtime_error(TimeoutText(call));
    if (waited > kSpinFor) std::this_thread::sleep_for(kPollInterval);
  }
  if (result != Result::kSuccess) throw std::runtime_error(Text(result, call));
}

Result NcclTransport::RunWithTimeout(std::function<Result()> work, const char* call) const {
  std::packaged_task<Result()> task([enter = enter_, work = std::move(work)] {
    enter();
    return work();
  });
  std::future<Result> result = task.get_future();
  // Detached, and with copies of all it uses: a thread that hangs in NCCL cannot be joined, and outlives this object.
  std::thread(std::move(task)).detach();
  if (result.wait_for(timeout_) != std::future_status::ready) throw std::runtime_error(TimeoutText(call));
  return result.get();
}

std::string NcclTransport::TimeoutText(const char* call) const {
  return std::string(call) + " timed out after " + std::to_string(timeout_.count()) +
         " s: check that all ranks make the same call";
}

std::string NcclTransport::Text(Result result, const char* call) const {
  const char* last = nccl_.get_last_error(comm_);
  const std::string details = last != nullptr && *last != '\0' ? std::string(" (") + last + ")" : "";
  return std::string(call) + ": " + nccl_.get_error_string(result) + details;
}

}  // namespace zcomm::nccl
