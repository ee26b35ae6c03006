// A hop over NCCL against functions that stand for NCCL's: what is called, with what, and what its answers become.

#include "nccl_transport.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "test_util.h"

namespace zcomm::nccl {
namespace {

struct Fake {
  std::vector<std::string> calls;
  int num_in_progress = 0;  // how often a call is still under way
  Result then = Result::kSuccess;
  Result send_result = Result::kSuccess;
  int blocking = -1;
  int comm = 0;
};
Fake fake;

Result Answer(const std::string& call) {
  fake.calls.push_back(call);
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
  f.get_last_error = [](Comm) { return "no route"; };
  f.comm_init_rank_config = [](Comm* comm, int size, UniqueId id, int rank, Config* config) {
    *comm = &fake.comm;
    fake.blocking = config->blocking;
    return Answer("init " + std::to_string(rank) + "/" + std::to_string(size) + id.internal[127]);
  };
  f.comm_finalize = [](Comm) { return Answer("finalize"); };
  f.comm_destroy = [](Comm) { return Answer("destroy"); };
  f.comm_abort = [](Comm) { return Answer("abort"); };
  f.comm_get_async_error = [](Comm comm, Result* result) {
    EXPECT(comm == &fake.comm, "communicator");
    *result = fake.num_in_progress > 0 ? Result::kInProgress : fake.then;
    if (fake.num_in_progress > 0) --fake.num_in_progress;
    return Result::kSuccess;
  };
  f.group_start = [] { return Answer("{"); };
  f.group_end = [] { return Answer("}"); };
  f.all_gather = [](const void* send, void* receive, std::size_t count, DataType, Comm, Stream stream) {
    return Answer("gather " + Place(send) + ">" + Place(receive) + " " + std::to_string(count) + " on " +
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
constexpr auto kLong = std::chrono::duration<double>(60);

NcclTransport Joined(int num_in_progress = 0, std::chrono::duration<double> timeout = kLong) {
  fake = Fake();
  fake.num_in_progress = num_in_progress;
  return NcclTransport(&library, MakeUniqueId(library), 2, 1, timeout);
}

std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
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
    EXPECT(fake.blocking == 0 && transport.rank() == 1 && transport.size() == 2, "does not block");
    ExpectCalls({"init 1/2i"});
  }
  ExpectCalls({"finalize", "destroy"});
  {
    NcclTransport transport = Joined();
    transport.Abort();
    EXPECT(transport.AsyncError().empty(), "nothing more to say");
    transport.Abort();
  }
  ExpectCalls({"init 1/2i", "abort"});
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
  const std::string sent = ErrorOf([&] { transport.Exchange({At(1), 1, 0}, {At(9), 1, 0}, 1, 1, nullptr); });
  EXPECT(sent == "ncclSend and ncclRecv: system error (no route)", "%s", sent.c_str());
  EXPECT(fake.calls.back() == "}", "the group is ended");
  fake.num_in_progress = 2;
  fake.then = Result::kSystemError;
  const std::string later = ErrorOf([&] { transport.Gather(At(1), At(9), 1, 1, nullptr); });
  EXPECT(later == "ncclAllGather: system error (no route)", "%s", later.c_str());
  EXPECT(transport.AsyncError() == "NCCL: system error (no route)", "%s", transport.AsyncError().c_str());
  fake.num_in_progress = 1;
  EXPECT(transport.AsyncError().empty(), "in progress is no error");
  EXPECT(ErrorOf([] { MakeUniqueId(library); }) == "ncclGetUniqueId: system error", "id");
}

void CheckTimeouts() {
  const std::string alone = ErrorOf([] { Joined(1 << 30, std::chrono::duration<double>(0.01)); });
  EXPECT(Contains(alone, "ncclCommInitRankConfig has not ended within 0.01"), "%s", alone.c_str());
  ExpectCalls({"init 1/2i", "abort"});
}

}  // namespace
}  // namespace zcomm::nccl

int main() {
  zcomm::nccl::CheckLife();
  zcomm::nccl::CheckCalls();
  zcomm::nccl::CheckErrors();
  zcomm::nccl::CheckTimeouts();
  std::puts("ok");
  return 0;
}
