// A hop over fake NCCL functions: what is called, with which arguments, and what becomes of the results.

#include "nccl_transport.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "test_util.h"

namespace zcomm::nccl {
namespace {

struct Fake {
  std::vector<std::string> calls;
  int num_in_progress = 0;  // how often a call is still in progress
  Result then = Result::kSuccess;
  Result send_result = Result::kSuccess;
  const char* last_error = "no route";
  int blocking = -1;
  int split_blocking = -1;
  int num_polls = 0;
  int comm = 0;
  int split = 0;
  const char* hanging = "";  // a call that returns when a communicator is aborted
  std::atomic<bool> is_hanging = false;
  std::atomic<bool> is_aborted = false;
};
Fake fake;

void ResetFake() {
  fake.~Fake();
  new (&fake) Fake();
}

const char* Of(Comm comm) { return comm == &fake.split ? "'" : ""; }

std::mutex calls_mutex;
std::atomic<int> num_hanging = 0;

Result RecordCall(const std::string& call) {
  {
    const std::lock_guard<std::mutex> lock(calls_mutex);
    fake.calls.push_back(call);
  }
  if (call == fake.hanging) {
    ++num_hanging;
    fake.is_hanging = true;
    while (!fake.is_aborted) std::this_thread::yield();
    --num_hanging;
    return Result::kInternalError;
  }
  return fake.num_in_progress > 0 ? Result::kInProgress : fake.then;
}

std::string Place(const void* data) { return std::to_string(reinterpret_cast<std::uintptr_t>(data)); }

Library MakeLibrary() {
  Functions f{};
  f.get_unique_id = [](UniqueId* id) {
    std::fill_n(id->internal, kUniqueIdNbytes, 'i');
    return fake.then;
  };
  f.get_error_string = [](Result result) { return result == Result::kSystemError ? "system error" : "other"; };
  f.get_last_error = [](Comm) { return fake.last_error; };
  f.comm_init_rank_config = [](Comm* comm, int size, UniqueId id, int rank, Config* config) {
    *comm = &fake.comm;
    fake.blocking = config->blocking;
    return RecordCall("init " + std::to_string(rank) + "/" + std::to_string(size) + id.internal[127]);
  };
  f.comm_split = [](Comm comm, int color, int key, Comm* split, Config* config) {
    EXPECT(comm == &fake.comm, "of the first");
    *split = &fake.split;
    fake.split_blocking = config->blocking;
    const Result result = RecordCall("split " + std::to_string(color) + " " + std::to_string(key));
    if (result != Result::kSuccess) return result;
    fake.num_in_progress = 3;
    return Result::kSuccess;  // while the split is in progress, as NCCL 2.28 does
  };
  f.comm_finalize = [](Comm comm) {
    if (fake.num_in_progress > 0) return Result::kInvalidArgument;
    return RecordCall(std::string("finalize") + Of(comm));
  };
  f.comm_destroy = [](Comm comm) { return RecordCall(std::string("destroy") + Of(comm)); };
  f.comm_abort = [](Comm comm) {
    const Result result = RecordCall(std::string("abort") + Of(comm));
    fake.is_aborted = true;
    return result;
  };
  f.comm_get_async_error = [](Comm comm, Result* result) {
    EXPECT(comm == &fake.comm || comm == &fake.split, "communicator");
    ++fake.num_polls;
    *result = fake.num_in_progress > 0 ? Result::kInProgress : fake.then;
    if (fake.num_in_progress > 0) --fake.num_in_progress;
    return Result::kSuccess;
  };
  f.group_start = [] { return RecordCall("{"); };
  f.group_end = [] { return RecordCall("}"); };
  f.all_gather = [](const void* send, void* receive, std::size_t count, DataType, Comm comm, Stream stream) {
    EXPECT(comm == (fake.split_blocking < 0 ? &fake.comm : &fake.split), "the communicator that runs");
    return RecordCall("gather " + Place(send) + ">" + Place(receive) + " " + std::to_string(count) + " on " +
                      Place(stream));
  };
  f.send = [](const void* data, std::size_t count, DataType, int peer, Comm, Stream) {
    fake.calls.push_back("send " + Place(data) + " " + std::to_string(count) + " to " + std::to_string(peer));
    return fake.send_result;
  };
  f.recv = [](void* data, std::size_t count, DataType, int peer, Comm, Stream) {
    fake.calls.push_back("recv " + Place(data) + " " + std::to_string(count) + " from " + std::to_string(peer));
    return Result::kSuccess;
  };
  return {"fake", 22907, f};
}

const Library library = MakeLibrary();
// A library older than 2.18.
const Library old_library = [] {
  Library old = MakeLibrary();
  old.functions.comm_split = nullptr;
  return old;
}();
constexpr auto kLong = std::chrono::duration<double>(60);

NcclTransport Joined(int num_in_progress = 0, std::chrono::duration<double> timeout = kLong,
                     const Library& of = library) {
  ResetFake();
  fake.num_in_progress = num_in_progress;
  return NcclTransport(&of, MakeUniqueId(of), 2, 1, timeout);
}

void ExpectCalls(const std::vector<std::string>& expected) {
  std::string got;
  for (const std::string& call : fake.calls) got += "\n  " + call;
  EXPECT(fake.calls == expected, "calls:%s", got.c_str());
  fake.calls.clear();
}

std::uint8_t* At(std::uintptr_t address) { return reinterpret_cast<std::uint8_t*>(address); }

void CheckLife() {
  {
    NcclTransport transport = Joined(/*num_in_progress=*/3);
    EXPECT(fake.blocking == 0 && transport.rank() == 1 && transport.size() == 2, "joins without blocking");
    EXPECT(fake.split_blocking == 1, "runs blocking");
    ExpectCalls({"init 1/2i", "split 0 1", "finalize", "destroy"});
  }
  ExpectCalls({"finalize'", "destroy'"});
  {
    NcclTransport transport = Joined();
    transport.Abort();
    EXPECT(transport.AsyncError().empty(), "nothing more to say");
    transport.Abort();
  }
  ExpectCalls({"init 1/2i", "split 0 1", "finalize", "destroy", "abort'"});
  {
    NcclTransport transport = Joined(/*num_in_progress=*/3, kLong, old_library);
    ExpectCalls({"init 1/2i"});
    fake.num_in_progress = 5;
    transport.Gather(At(8), At(0), 8, 8, nullptr);
    EXPECT(fake.num_in_progress == 0 && fake.num_polls == 3 + 1 + 5 + 1, "%d polls", fake.num_polls);
    fake.calls.clear();
  }
  ExpectCalls({"finalize", "destroy"});
}

// Nothing but NCCL's own calls: the host neither polls nor sleeps, and starts no thread.
void CheckCostOfCalls() {
  constexpr int kNumCalls = 1000;
  NcclTransport transport = Joined(/*num_in_progress=*/3);
  fake.calls.clear();
  fake.calls.reserve(20 * kNumCalls);
  fake.num_polls = 0;
  rusage before{};
  rusage after{};
  getrusage(RUSAGE_THREAD, &before);
  for (int i = 0; i < kNumCalls; ++i) {
    transport.Gather(At(108), At(100), 8, 8, nullptr);
    transport.Exchange({At(1000), 40, 4}, {At(2000), 20, 8}, 4, 2, nullptr);
  }
  getrusage(RUSAGE_THREAD, &after);
  EXPECT(fake.num_polls == 0, "%d polls", fake.num_polls);
  EXPECT(fake.calls.size() == 11 * kNumCalls, "%zu calls of NCCL", fake.calls.size());
  const long num_sleeps = after.ru_nvcsw - before.ru_nvcsw;  // what sleeps or waits for a thread gives up the processor
  EXPECT(num_sleeps < kNumCalls / 10, "the host slept %ld times in %d calls", num_sleeps, kNumCalls);
}

void CheckCalls() {
  NcclTransport transport = Joined();
  fake.calls.clear();
  transport.Gather(At(108), At(100), 8, 8, At(5));
  ExpectCalls({"gather 108>100 8 on 5"});
  transport.Gather(At(300), At(100), 16, 8, nullptr);
  ExpectCalls({"{", "send 300 8 to 0", "recv 100 8 from 0", "send 300 8 to 1", "recv 116 8 from 1", "}"});
  transport.Gather(At(116), At(100), 16, 8, nullptr);
  ExpectCalls({"{", "send 116 8 to 0", "recv 100 8 from 0", "}"});
  transport.Exchange({At(1000), 40, 4}, {At(2000), 20, 8}, 4, 2, nullptr);
  ExpectCalls({"{", "send 1000 4 to 0", "recv 2000 4 from 0", "send 1004 4 to 0", "recv 2008 4 from 0",
               "send 1040 4 to 1", "recv 2020 4 from 1", "send 1044 4 to 1", "recv 2028 4 from 1", "}"});
  EXPECT(transport.Register(At(1), 1) == nullptr, "an NCCL without registration");
}

void CheckErrors() {
  NcclTransport transport = Joined();
  fake.calls.clear();
  fake.send_result = Result::kSystemError;
  const std::string sent =
      MessageOf<std::runtime_error>([&] { transport.Exchange({At(1), 1, 0}, {At(9), 1, 0}, 1, 1, nullptr); });
  EXPECT(sent == "ncclSend and ncclRecv: system error (no route)", "%s", sent.c_str());
  EXPECT(fake.calls.back() == "}", "the group is ended");
  fake.num_in_progress = 2;
  fake.then = Result::kSystemError;
  const std::string later = MessageOf<std::runtime_error>([&] { transport.Gather(At(1), At(9), 1, 1, nullptr); });
  EXPECT(later == "ncclAllGather: system error (no route)", "%s", later.c_str());
  EXPECT(transport.AsyncError() == "NCCL: system error (no route)", "%s", transport.AsyncError().c_str());
  for (const char* nothing : {"", static_cast<const char*>(nullptr)}) {  // NCCL has no more to say
    fake.last_error = nothing;
    EXPECT(transport.AsyncError() == "NCCL: system error", "%s", transport.AsyncError().c_str());
  }
  fake.num_in_progress = 1;
  EXPECT(transport.AsyncError().empty(), "in progress is no error");
  EXPECT(MessageOf<std::runtime_error>([] { MakeUniqueId(library); }) == "ncclGetUniqueId: system error", "id");
}

// Abort() in another thread ends a call that hangs inside NCCL; the timeout ends a destructor that hangs.
void CheckHangs() {
  {
    NcclTransport transport = Joined();
    fake.hanging = "}";
    std::thread watch([&] {
      while (!fake.is_hanging) std::this_thread::yield();
      transport.Abort();
    });
    const std::string error =
        MessageOf<std::runtime_error>([&] { transport.Exchange({At(1), 1, 0}, {At(9), 1, 0}, 1, 1, nullptr); });
    EXPECT(Contains(error, "ncclSend and ncclRecv: ") || Contains(error, "ncclGroupEnd: "), "%s", error.c_str());
    watch.join();
  }
  EXPECT(fake.calls.back() == "}" || fake.calls.back() == "abort'", "an aborted communicator is not finalized");
  {
    NcclTransport transport = Joined(0, std::chrono::duration<double>(0.3));
    fake.hanging = "finalize'";
  }
  while (num_hanging > 0) std::this_thread::yield();  // the detached thread still reads the fake
  const std::lock_guard<std::mutex> lock(calls_mutex);
  EXPECT(fake.calls.back() == "abort'", "%s", fake.calls.back().c_str());
}

void CheckTimeouts() {
  const std::string alone = MessageOf<std::runtime_error>([] { Joined(1 << 30, std::chrono::duration<double>(0.01)); });
  EXPECT(Contains(alone, "ncclCommInitRankConfig timed out after 0.01"), "%s", alone.c_str());
  ExpectCalls({"init 1/2i", "abort"});
  ResetFake();
  fake.hanging = "";
  Library never = library;
  never.functions.comm_split = [](Comm, int, int, Comm*, Config*) {
    fake.num_in_progress = 1 << 30;
    return RecordCall("split");
  };
  const std::string split = MessageOf<std::runtime_error>(
      [&] { NcclTransport(&never, MakeUniqueId(never), 2, 1, std::chrono::duration<double>(0.01)); });
  EXPECT(Contains(split, "ncclCommSplit timed out after 0.01"), "%s", split.c_str());
  ExpectCalls({"init 1/2i", "split", "abort"});
}

}  // namespace
}  // namespace zcomm::nccl

int main() {
  zcomm::nccl::CheckLife();
  zcomm::nccl::CheckCalls();
  zcomm::nccl::CheckCostOfCalls();
  zcomm::nccl::CheckErrors();
  zcomm::nccl::CheckTimeouts();
  zcomm::nccl::CheckHangs();
  std::puts("ok");
  return 0;
}
