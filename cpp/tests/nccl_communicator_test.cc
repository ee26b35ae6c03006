// The communicator on fake GPUs: the reference's bits in whatever order streams run, no redundant wait, transfers that
// overlap, and an error on every rank after any failure.

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <thread>

#include "communicator.h"
#include "fake_ranks.h"
#include "test_util.h"

namespace zcomm::nccl {
namespace {

constexpr Wire kInt8 = {Codec::kInt8, 256, {11, 12}};
constexpr Wire kInt4 = {Codec::kInt4, 128, {21, 22}};
constexpr Wire kNf4 = {Codec::kNf4, 64, {31, 32}};
constexpr Wire kFloat = {Codec::kFloat32, 0, {0, 0}};
constexpr Wire kBfloat = {Codec::kBfloat16, 0, {0, 0}};
constexpr std::size_t kChunk = 256;
constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBfloat16;

// One hop over `ranks`.
Case OneHop(Collective collective, std::size_t ranks, const Wire& wire, std::size_t numel = 1000) {
  return {collective, 1, ranks, {wire}, kF32, kF32, numel, kChunk, false};
}

Case TwoHops(Collective collective, const Wire& first, const Wire& second, std::size_t numel = 1500) {
  return {collective, 2, 2, {first, second}, kF32, kF32, numel, kChunk, true};
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto collective : {Collective::kGather, Collective::kReduce, Collective::kExchange}) {
    for (const std::size_t ranks : {1, 2, 3, 4}) {
      for (const Wire& wire : {kInt8, kNf4, kFloat, kBfloat}) cases.push_back(OneHop(collective, ranks, wire));
    }
    for (const std::size_t numel : {1, 255, 256, 257, 512, 1791}) {
      cases.push_back(OneHop(collective, 2, kInt4, numel));
      cases.push_back(TwoHops(collective, kInt8, kNf4, numel));
    }
    const std::vector<std::pair<Wire, Wire>> pairs = {{kInt8, kInt8},   {kInt8, kInt4},   {kFloat, kFloat},
                                                      {kInt8, kBfloat}, {kBfloat, kInt4}, {kFloat, kBfloat}};
    for (const auto& [first, second] : pairs) {
      cases.push_back(TwoHops(collective, first, second));
      if (collective == Collective::kExchange) cases.back().is_numbered_local = false;
      cases.push_back(cases.back());
      cases.back().is_numbered_local = false;
      cases.back().input = kBf16;
      cases.push_back({collective, 3, 2, {first, second}, kBf16, kF32, 700, kChunk, false});
      cases.push_back(
          {collective, 2, 3, {first, second}, kF32, kBf16, 700, kChunk, collective != Collective::kExchange});
    }
  }
  for (Case& c : cases) {
    if (c.collective == Collective::kExchange) c.is_numbered_local = false;  // there is one way
  }
  return cases;
}

void Expect(const FakeRanks& ranks, std::uint32_t seed) {
  const std::string difference = ranks.Difference();
  EXPECT(difference.empty(), "seed %u: %s", seed, difference.c_str());
}

// Several calls, some on a GPU that is far behind its host, some on one that keeps up.
void CheckBits() {
  std::uint32_t seed = 0;
  for (const Case& c : Cases()) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      FakeWorld world(++seed);
      {
        FakeRanks ranks(&world, c);
        if (repeat > 0) world.Pause();
        ranks.CallAll();
        ranks.NewRound();
        ranks.CallAll();
        world.Resume();
        world.Synchronize();
        Expect(ranks, seed);
      }
      EXPECT(world.num_alive() == 0, "%s: %zu things leaked", c.Name().c_str(), world.num_alive());
    }
  }
}

// Whether two calls on two streams give the right bits if a wait of the first rank, or none, is left out.
bool IsRightWithout(const Case& c, std::size_t wait, std::uint32_t seed, std::size_t* num_waits) {
  FakeWorld world(seed);
  FakeRanks ranks(&world, c);
  world.TakeNumWaits(0);
  world.ForgetWait(0, wait);
  world.Pause();
  for (std::size_t rank = 0; rank < c.num_ranks(); ++rank) ranks.Call(rank);
  ranks.NewRound();
  for (std::size_t rank = 0; rank < c.num_ranks(); ++rank) ranks.Call(rank);
  *num_waits = world.TakeNumWaits(0);
  world.Resume();
  world.Synchronize();
  return ranks.Difference().empty();
}

// Each wait is needed: without it, some interleaving gives wrong bits.
void CheckEveryWaitIsNeeded() {
  constexpr std::size_t kNone = SIZE_MAX;
  constexpr std::uint32_t kMaxSeed = 20000;  // some waits matter in one interleaving of a hundred
  const std::vector<Case> cases = {OneHop(Collective::kReduce, 2, kFloat), OneHop(Collective::kGather, 2, kFloat),
                                   TwoHops(Collective::kReduce, kInt8, kNf4)};
  for (const Case& c : cases) {
    std::size_t num_waits = 0;
    EXPECT(IsRightWithout(c, kNone, 1, &num_waits), "%s", c.Name().c_str());
    const bool has_workspace = c.wires[0].codec != Codec::kFloat32 || c.collective != Collective::kGather;
    for (std::size_t wait = has_workspace; wait < num_waits; ++wait) {  // the workspace is free for the first call
      std::size_t ignored = 0;
      std::uint32_t seed = 1;
      while (seed < kMaxSeed && IsRightWithout(c, wait, seed, &ignored)) ++seed;
      EXPECT(seed < kMaxSeed, "%s: wait %zu of %zu is not needed", c.Name().c_str(), wait, num_waits);
    }
  }
}

void CheckOverlap() {
  for (const auto collective : {Collective::kGather, Collective::kReduce, Collective::kExchange}) {
    for (const bool has_chunks : {false, true}) {
      std::size_t num_overlaps = 0;
      for (std::uint32_t seed = 0; seed < 20; ++seed) {
        Case c = OneHop(collective, 2, kInt8, 8 * kChunk);
        if (!has_chunks) c.chunk_numel = c.numel;
        FakeWorld world(seed);
        FakeRanks ranks(&world, c);
        world.Pause();
        ranks.CallAll();
        world.Resume();
        world.Synchronize();
        Expect(ranks, seed);
        num_overlaps += world.num_overlaps();
      }
      EXPECT(has_chunks ? num_overlaps > 40 : num_overlaps == 0, "%zu kernels beside transfers", num_overlaps);
    }
  }
}

using Counts = std::map<std::string, std::size_t>;

// The kernels, transfers and events of a call in the steady state, on rank 0. Each costs the host some microseconds.
Counts CountsOf(const Case& c) {
  FakeWorld world(9);
  FakeRanks ranks(&world, c);
  ranks.CallAll();
  ranks.NewRound();
  world.Synchronize();
  world.TakeCounts(0);
  ranks.CallAll();
  world.Synchronize();
  Expect(ranks, 9);
  return world.TakeCounts(0);
}

std::string Text(const Counts& counts) {
  std::string text;
  for (const auto& [name, count] : counts) text += " " + name + " " + std::to_string(count);
  return text;
}

// What a chunk launches; its stages; and with chunks, the events: one recorded for each stage of each chunk, for the
// workspace and for the end, and waits for the stage before, for the slot, for the workspace and by the caller. Nothing
// else: no copy, no memset, no assertion.
void CheckLaunches() {
  struct Row {
    Case c;
    std::size_t num_stages;
    Counts of_chunk;
  };
  const std::vector<Row> rows = {
      {OneHop(Collective::kGather, 2, kInt8), 3, {{"Quantize", 1}, {"Gather", 1}, {"Decode", 1}}},
      {OneHop(Collective::kReduce, 2, kInt8), 3, {{"Quantize", 1}, {"Exchange", 1}, {"DecodeSum", 1}}},
      {OneHop(Collective::kExchange, 2, kInt8), 3, {{"Quantize", 1}, {"Exchange", 1}, {"Decode", 1}}},
      {TwoHops(Collective::kGather, kInt8, kInt8), 4, {{"Quantize", 1}, {"Gather", 2}, {"Decode", 1}}},
      {TwoHops(Collective::kGather, kInt8, kInt4), 5, {{"Quantize", 2}, {"Gather", 2}, {"Decode", 2}}},
      {TwoHops(Collective::kReduce, kInt8, kInt4),
       5,
       {{"Quantize", 1}, {"Exchange", 2}, {"DecodeSumRequantize", 1}, {"DecodeSum", 1}}},
      {TwoHops(Collective::kExchange, kInt8, kInt8), 5, {{"Quantize", 2}, {"Exchange", 2}, {"Decode", 1}}},
      {TwoHops(Collective::kExchange, kInt8, kInt4), 5, {{"Quantize", 3}, {"Exchange", 2}, {"Decode", 3}}},
  };
  for (const Row& row : rows) {
    for (const std::size_t chunks : {1, 4, 7}) {
      Case c = row.c;
      c.numel = chunks * kChunk;
      c.is_numbered_local = c.is_numbered_local && c.collective != Collective::kExchange;
      Counts expected;
      for (const auto& [name, count] : row.of_chunk) expected[name] = count * chunks;
      const std::size_t with_full_slots = chunks > row.num_stages ? chunks - row.num_stages : 0;
      expected["Record"] = row.num_stages * chunks + 2;
      expected["Wait"] = (row.num_stages - 1) * chunks + with_full_slots + 2;
      const Counts got = CountsOf(c);
      EXPECT(got == expected, "%s:%s, expected%s", c.Name().c_str(), Text(got).c_str(), Text(expected).c_str());
    }
  }
  const Counts got = CountsOf(OneHop(Collective::kGather, 2, kFloat, 4 * kChunk));  // in place, in one piece
  const Counts plain = {{"Gather", 1}, {"Record", 3}, {"Wait", 2}};
  EXPECT(got == plain, "in place:%s", Text(got).c_str());
}

// Rank 0 fails at its call number `number`. Both ranks get an error, and nothing is leaked.
void CheckFailure(const Case& c, std::size_t number) {
  FakeWorld world(static_cast<std::uint32_t>(number));
  {
    FakeRanks ranks(&world, c, /*timeout_s=*/0.02);
    world.FailAt(0, number);
    const std::string error = MessageOf<std::runtime_error>([&] { ranks.Call(0); });
    EXPECT(Contains(error, "injected failure in ") && Contains(error, "has been aborted"), "%s", error.c_str());
    EXPECT(MessageOf<std::runtime_error>([&] { ranks.Call(0); }) == error, "later calls say the same");
    std::string other = MessageOf<std::runtime_error>([&] { ranks.Call(1); });
    while (other.empty()) other = MessageOf<std::runtime_error>([&] { ranks.communicator(1)->Check(); });
    EXPECT(Contains(other, "timed out after") && Contains(other, "has been aborted"), "%s", other.c_str());
  }
  EXPECT(world.num_alive() == 0, "call %zu: %zu things leaked", number, world.num_alive());
}

// How often rank 0 calls the GPU or NCCL in one collective call.
std::size_t NumCalls(const Case& c) {
  FakeWorld world(1);
  FakeRanks ranks(&world, c);
  world.TakeNumCalls(0);
  ranks.CallAll();
  const std::size_t num_calls = world.TakeNumCalls(0);
  world.Synchronize();
  return num_calls;
}

// Every call to the GPU or to NCCL, of every stage of every chunk.
void CheckEveryFailure() {
  const Case c = OneHop(Collective::kReduce, 2, kInt8, 700);
  const std::size_t num_calls = NumCalls(c);
  EXPECT(num_calls > 30, "only %zu calls", num_calls);
  for (std::size_t number = 0; number < num_calls; ++number) CheckFailure(c, number);
}

void CheckFailureOfConstruction() {
  const Case c = OneHop(Collective::kGather, 1, kInt8);
  for (std::size_t number = 0;; ++number) {
    FakeWorld world(1);
    world.FailAt(0, number);
    const std::string error = MessageOf<std::runtime_error>([&] { FakeRanks ranks(&world, c); });
    EXPECT(world.num_alive() == 0, "call %zu: %zu things leaked", number, world.num_alive());
    if (error.empty()) return;
    EXPECT(Contains(error, "injected failure in Create"), "%s", error.c_str());
  }
}

// The other rank never calls.
void CheckTimeoutAndAbort() {
  const Case c = TwoHops(Collective::kReduce, kInt8, kInt4);
  FakeWorld world(3);
  FakeRanks ranks(&world, c, /*timeout_s=*/0.05);
  ranks.Call(0);
  std::string error;
  while (error.empty()) error = MessageOf<std::runtime_error>([&] { ranks.communicator(0)->Check(); });
  EXPECT(Contains(error, "reduce_scatter timed out after 0.05"), "%s", error.c_str());
  ranks.communicator(1)->Abort("rank 1 gives up");
  EXPECT(Contains(MessageOf<std::runtime_error>([&] { ranks.Call(1); }), "rank 1 gives up"), "aborted by hand");
  world.SetAsyncError(2, "remote process exited");
  while (!Contains(error, "remote process exited"))
    error = MessageOf<std::runtime_error>([&] { ranks.communicator(2)->Check(); });
  ranks.Close(3);  // with nothing in flight
}

// Once the first hop of a call is aborted, the stages that waited in it go on: the second hop must send nothing more.
void CheckOrderOfAborts() {
  const std::vector<std::size_t> inside = {0, 1}, between = {0, 2};
  for (const auto& [collective, wanted] : {std::pair(Collective::kReduce, std::vector({between, inside})),
                                           std::pair(Collective::kGather, std::vector({inside, between}))}) {
    const Case c = TwoHops(collective, kInt8, kInt8);
    FakeWorld late(4);
    FakeRanks waiting(&late, c, /*timeout_s=*/0.05);
    waiting.Call(0);
    while (MessageOf<std::runtime_error>([&] { waiting.communicator(0)->Check(); }).empty()) {
    }
    EXPECT(late.Aborted(0) == wanted, "of a call that is late");
    FakeWorld stuck(5);
    FakeRanks hanging(&stuck, c, /*timeout_s=*/0.02);
    stuck.HangAt(0, 5);
    EXPECT(!MessageOf<std::runtime_error>([&] { hanging.Call(0); }).empty(), "a call that hangs");
    EXPECT(stuck.Aborted(0).front() == wanted.front(), "of a call that does not get queued");
  }
}

// A call of CUDA or NCCL hangs, and fails or returns when it is aborted: every call of a collective in turn.
void CheckStuckCalls() {
  const Case c = OneHop(Collective::kReduce, 2, kInt8, 300);
  const std::size_t num_calls = NumCalls(c);
  EXPECT(num_calls > 15, "only %zu calls", num_calls);
  for (std::size_t number = 0; number < num_calls; ++number) {
    for (const bool then_fails : {true, false}) {
      FakeWorld world(static_cast<std::uint32_t>(number));
      FakeRanks ranks(&world, c, /*timeout_s=*/0.02);
      world.HangAt(0, number, then_fails);
      const std::string error = MessageOf<std::runtime_error>([&] { ranks.Call(0); });
      EXPECT(Contains(error, "reduce_scatter timed out after 0.02"), "call %zu: %s", number, error.c_str());
      EXPECT(Contains(ranks.communicator(0)->Finish(), "timed out"), "Finish after call %zu", number);
    }
  }
}

// Abort() in another thread does not wait for a call that hangs, but ends it.
void CheckAbortWhileQueueing() {
  const Case c = OneHop(Collective::kReduce, 2, kInt8, 300);
  FakeWorld world(1);
  FakeRanks ranks(&world, c, /*timeout_s=*/60);
  world.TakeCounts(0);
  world.HangAt(0, 3);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.communicator(0)->Abort("the ranks make different calls");
  });
  const std::string error = MessageOf<std::runtime_error>([&] { ranks.Call(0); });
  other.join();
  EXPECT(Contains(error, "the ranks make different calls"), "%s", error.c_str());
  EXPECT(Contains(MessageOf<std::runtime_error>([&] { ranks.Call(0); }), "the ranks make different calls"),
         "the next call");
}

// Abort() ends the wait of Finish(), which gives its reason.
void CheckAbortWhileFinishing() {
  const Case c = OneHop(Collective::kReduce, 2, kInt8, 300);
  FakeWorld world(1);
  FakeRanks ranks(&world, c, /*timeout_s=*/60);
  ranks.Call(0);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks.communicator(0)->Abort("the ranks make different calls");
  });
  const std::string error = ranks.communicator(0)->Finish();
  other.join();
  EXPECT(error == "the ranks make different calls", "%s", error.c_str());
}

// A graph is captured once and runs twice, each time on the current input.
void CheckCapture() {
  for (const Case& c : {TwoHops(Collective::kReduce, kInt8, kNf4), TwoHops(Collective::kGather, kInt8, kInt8)}) {
    FakeWorld world(5);
    FakeRanks ranks(&world, c);
    world.Pause();
    ranks.CallAll();  // their workspaces are in use, and their ends would be asked for
    ranks.NewRound();
    std::vector<std::function<void()>> graphs;
    for (std::size_t rank = 0; rank < c.num_ranks(); ++rank) {
      world.BeginCapture(ranks.stream(rank));
      if (rank == 0) {
        std::string error;
        try {
          ranks.Call(0);
        } catch (const std::invalid_argument& refused) {
          error = refused.what();
        }
        EXPECT(Contains(error, "needs a workspace of"), "%s", error.c_str());
        world.EndCapture(ranks.stream(0));
        world.BeginCapture(ranks.stream(0));
      }
      ranks.ProvideWorkspace(rank, ranks.WorkspaceNbytes(rank));
      ranks.Call(rank);
      graphs.push_back(world.EndCapture(ranks.stream(rank)));
    }
    world.Resume();
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const auto& replay : graphs) replay();
    }
    world.Synchronize();
    Expect(ranks, 5);
  }
}

// The end of a message does not arrive, and in its place is the end of an equal message of the previous call.
void CheckShortMessages() {
  std::size_t num_cases = 0;
  for (const auto collective : {Collective::kGather, Collective::kReduce, Collective::kExchange}) {
    const std::vector<Case> cases = {
        OneHop(collective, 2, kInt8, 600),
        OneHop(collective, 3, kNf4, 256),
        TwoHops(collective, kInt8, kInt8, 600),
        TwoHops(collective, kInt8, kNf4, 256),
    };
    for (Case c : cases) {
      if (collective == Collective::kExchange) c.is_numbered_local = false;
      const std::size_t num_transfers = c.wires.size() * ((c.numel + c.chunk_numel - 1) / c.chunk_numel);
      for (std::size_t number = 0; number < num_transfers; ++number, ++num_cases) {
        FakeWorld world(static_cast<std::uint32_t>(number + 1));
        FakeRanks ranks(&world, c);
        for (int call = 0; call < 2; ++call) {  // fills every slot with messages of the same layouts
          ranks.CallAll();
          ranks.NewRound();
        }
        world.Synchronize();
        world.Shorten(0, number);
        ranks.CallAll();
        world.Synchronize();
        EXPECT(Contains(ranks.Difference(), "got another message"), "%s, transfer %zu", c.Name().c_str(), number);
      }
    }
  }
  EXPECT(num_cases > 30, "only %zu cases", num_cases);
}

// Over each hop of two, beside a call that goes over both.
void CheckBytes() {
  constexpr std::size_t kNbytes = 100;
  constexpr std::size_t kStride = 112;
  const Case c = TwoHops(Collective::kReduce, kInt8, kNf4);
  for (const std::size_t hop : {0, 1}) {
    for (const bool is_gather : {false, true}) {
      FakeWorld world(7);
      FakeRanks ranks(&world, c);
      std::vector<Bytes> inputs;
      std::vector<Bytes> outputs(4, Bytes(2 * kStride, 0));
      for (std::size_t rank = 0; rank < 4; ++rank) {
        inputs.emplace_back(2 * kNbytes);
        for (std::size_t i = 0; i < 2 * kNbytes; ++i) inputs[rank][i] = static_cast<std::uint8_t>(rank * 53 + i);
      }
      world.Pause();
      for (std::size_t rank = 0; rank < 4; ++rank) {
        ranks.Call(rank);
        ranks.communicator(rank)->Run(
            BytesCall{hop, is_gather, inputs[rank].data(), outputs[rank].data(), kStride, kNbytes},
            {ranks.stream(rank), nullptr, nullptr, 0});
      }
      world.Resume();
      world.Synchronize();
      Expect(ranks, 7);
      for (std::size_t rank = 0; rank < 4; ++rank) {
        const std::size_t own = hop == 0 ? rank % 2 : rank / 2;
        for (std::size_t part = 0; part < 2; ++part) {
          const std::size_t peer = hop == 0 ? rank / 2 * 2 + part : part * 2 + rank % 2;
          const auto* sent = inputs[peer].data() + (is_gather ? 0 : own * kNbytes);
          const auto* got = outputs[rank].data() + part * kStride;
          EXPECT(std::equal(sent, sent + kNbytes, got), "hop %zu, gather %d, rank %zu, part %zu", hop, is_gather, rank,
                 part);
        }
        EXPECT(outputs[rank][kNbytes] == 0, "between parts");
      }
    }
  }
  FakeWorld world(8);
  FakeRanks ranks(&world, c);
  const std::string error = MessageOfThrow([&] {
    ranks.communicator(0)->Run(BytesCall{2, true, nullptr, nullptr, 1, 1}, {ranks.stream(0), nullptr, nullptr, 0});
  });
  EXPECT(Contains(error, "no such hop: hop=2, hops=2"), "%s", error.c_str());
}

void CheckArguments() {
  FakeWorld world(1);
  Case c = OneHop(Collective::kReduce, 2, kInt8);
  c.chunk_numel = 128;  // half a block
  FakeRanks ranks(&world, c);
  const std::string error = MessageOfThrow([&] { ranks.Call(0); });
  EXPECT(Contains(error, "chunks must be whole blocks: chunk_numel=128"), "%s", error.c_str());
  EXPECT(Contains(MessageOfThrow(
                      [&] { MakePlan(ReduceCall{{0, 256, {kInt8}}, {}, kF32, nullptr, 1.0F}, {nullptr, {nullptr}}); }),
                  "nothing to send"),
         "zero length");
}

}  // namespace
}  // namespace zcomm::nccl

// All checks, or those that are named.
int main(int argc, char** argv) {
  using namespace zcomm::nccl;  // NOLINT
  const std::vector<std::pair<std::string, void (*)()>> checks = {
      {"CheckBits", CheckBits},
      {"CheckShortMessages", CheckShortMessages},
      {"CheckBytes", CheckBytes},
      {"CheckOverlap", CheckOverlap},
      {"CheckLaunches", CheckLaunches},
      {"CheckArguments", CheckArguments},
      {"CheckCapture", CheckCapture},
      {"CheckFailureOfConstruction", CheckFailureOfConstruction},
      {"CheckTimeoutAndAbort", CheckTimeoutAndAbort},
      {"CheckOrderOfAborts", CheckOrderOfAborts},
      {"CheckAbortWhileQueueing", CheckAbortWhileQueueing},
      {"CheckAbortWhileFinishing", CheckAbortWhileFinishing},
      {"CheckStuckCalls", CheckStuckCalls},
      {"CheckEveryFailure", CheckEveryFailure},
      {"CheckEveryWaitIsNeeded", CheckEveryWaitIsNeeded},
  };
  const std::vector<std::string> chosen(argv + 1, argv + argc);
  for (const auto& [name, check] : checks) {
    if (chosen.empty() || std::find(chosen.begin(), chosen.end(), name) != chosen.end()) check();
  }
  std::puts("ok");
  return 0;
}
