#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "test_util.h"
#include "zcomm/float_formats.h"

// A warp on the CPU: 32 lanes, each with its own stack, that run one after another in random order up to the next
// collective, where they wait for each other. If some lanes do not reach a collective, or reach it with other
// arguments, the test fails; so it does for an unaligned access. Between collectives, lanes see each other's writes or
// not, depending on the order, so that a missing synchronization shows, unless another collective stands beside it:
// here each one synchronizes, while on a GPU only Sync() orders memory.
namespace zcomm::cuda {

class EmulatedWarp {
 public:
  static int Lane() { return current_->lane_; }

  static std::uint32_t ShuffleXor(std::uint32_t word, int mask) {
    return current_->Synchronize(word, mask)[static_cast<std::size_t>(Lane() ^ mask)];
  }

  static std::uint32_t ShuffleNext(std::uint32_t word) {
    return current_->Synchronize(word, kNext)[static_cast<std::size_t>((Lane() + 1) % 32)];
  }

  static std::uint32_t MaxOfWarp(std::uint32_t word) {
    const auto& words = current_->Synchronize(word, kMax);
    return *std::max_element(words.begin(), words.end());
  }

  static std::uint32_t Shuffle(std::uint32_t word, std::uint32_t lane) {
    EXPECT(lane < 32, "lane %u", lane);
    return current_->Synchronize(word, kShuffle)[lane];
  }

  static std::uint32_t Ballot(bool flag) {
    const auto& flags = current_->Synchronize(flag ? 1U : 0U, kBallot);
    std::uint32_t mask = 0;
    for (std::size_t lane = 0; lane < 32; ++lane) mask |= flags[lane] << lane;
    return mask;
  }

  static void Sync() { current_->Synchronize(0, kSync); }

  static void Add(std::uint32_t* pointer, std::uint32_t word) { Store(pointer, Load<std::uint32_t>(pointer) + word); }
  static void AddShared(std::uint32_t* pointer, std::uint32_t word) { *pointer += word; }

  template <class W>
  static W Load(const void* pointer) {
    Touch(pointer, sizeof(W), "load");
    W value;
    std::memcpy(&value, pointer, sizeof(W));
    return value;
  }

  template <class W>
  static void Store(void* pointer, W value) {
    Touch(pointer, sizeof(W), "store");
    std::memcpy(pointer, &value, sizeof(W));
  }

  static void StoreIf(bool flag, void* pointer, std::uint16_t word) {
    if (flag) Store(pointer, word);
  }

  static float Divide(float a, float b) { return a / b; }
  static float MultiplyAdd(float a, float b, float c) { return std::fma(a, b, c); }
  static std::uint32_t Permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t bytes = a | static_cast<std::uint64_t>(b) << 32;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t digit = selector >> (4 * i) & 0xFU;
      EXPECT(digit < 8 && selector <= 0xFFFFU, "selector %x", selector);
      result |= static_cast<std::uint32_t>(bytes >> (8 * digit) & 0xFFU) << (8 * i);
    }
    return result;
  }
  static float FromFloat16(std::uint16_t bits) { return FloatFromFloat16(bits); }
  static std::uint32_t PackBfloat16(float low, float high) {
    return Bfloat16FromFloat(low) | static_cast<std::uint32_t>(Bfloat16FromFloat(high)) << 16;
  }
  static std::uint32_t PackFloat16(float low, float high) {
    return Float16FromFloat(low) | static_cast<std::uint32_t>(Float16FromFloat(high)) << 16;
  }

  // Runs `body` in all lanes.
  static void Run(const std::function<void()>& body, Random* random) {
    static EmulatedWarp warp;
    current_ = &warp;
    warp.RunLanes(body, random);
  }

  // By the width in bytes, since the test last looked.
  inline static std::array<std::size_t, 17> num_accesses{};

  struct Span {
    const void* data;
    std::size_t nbytes;
  };
  // The ranges that a kernel may access; empty: any.
  inline static std::vector<Span> allowed{};

 private:
  static constexpr int kMax = -1;
  static constexpr int kNext = -2;
  static constexpr int kShuffle = -3;
  static constexpr int kBallot = -4;
  static constexpr int kSync = -5;
  static constexpr std::size_t kStackNbytes = std::size_t{1} << 18;
  using Words = std::array<std::uint32_t, 32>;

  // Where a lane, or the scheduler, goes on.
  struct Place {
    void* registers[5];
  };

  struct LaneState {
    ucontext_t entry;
    Place context;
    bool has_begun = false;
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackNbytes);
    bool has_ended = false;
    int argument = 0;
  };

  static void Touch(const void* pointer, std::size_t nbytes, const char* what) {
    const auto at = reinterpret_cast<std::uintptr_t>(pointer);
    EXPECT(at % nbytes == 0, "a %s of %zu bytes at %p", what, nbytes, pointer);
    const auto holds = [&](const Span& span) {
      const auto begin = reinterpret_cast<std::uintptr_t>(span.data);
      return at >= begin && at + nbytes <= begin + span.nbytes;
    };
    EXPECT(allowed.empty() || std::any_of(allowed.begin(), allowed.end(), holds),
           "a %s of %zu bytes at %p is outside the rows and messages", what, nbytes, pointer);
    ++num_accesses[nbytes];
  }

  static void Enter() {
    (*current_->body_)();
    current_->lanes_[static_cast<std::size_t>(Lane())].has_ended = true;
    JumpTo(&current_->scheduler_);
  }

  // Two buffers: a lane may write to the next collective's before others have read this one's.
  const Words& Synchronize(std::uint32_t word, int argument) {
    Words& words = words_[generation_ % 2];
    words[static_cast<std::size_t>(lane_)] = word;
    LaneState& lane = lanes_[static_cast<std::size_t>(lane_)];
    lane.argument = argument;
    if (__builtin_setjmp(lane.context.registers) == 0) JumpTo(&scheduler_);
    return words;
  }

  void RunLanes(const std::function<void()>& body, Random* random) {
    body_ = &body;
    for (LaneState& lane : lanes_) {
      lane.has_begun = lane.has_ended = false;
      getcontext(&lane.entry);
      lane.entry.uc_stack = {lane.stack.get(), 0, kStackNbytes};
      lane.entry.uc_link = nullptr;
      makecontext(&lane.entry, &Enter, 0);
    }
    while (!lanes_[0].has_ended) {
      RunRound(random);
      for (const LaneState& lane : lanes_) {
        EXPECT(lane.has_ended == lanes_[0].has_ended, "some lanes wait in a collective, and others have ended");
        EXPECT(lane.has_ended || lane.argument == lanes_[0].argument, "lanes meet in collectives of %d and of %d",
               lane.argument, lanes_[0].argument);
      }
      ++generation_;
    }
  }

  void RunRound(Random* random) {
    std::array<int, 32> order;
    std::iota(order.begin(), order.end(), 0);
    for (std::uint32_t i = 31; i > 0; --i) std::swap(order[i], order[random->Below(i + 1)]);
    for (const int lane : order) {
      lane_ = lane;
      Resume(&lanes_[static_cast<std::size_t>(lane)]);
    }
  }

  // The compiler's own jump: swapcontext() makes a system call each time, and a checked longjmp() refuses another
  // stack. It looks as if it could return, because the address sanitizer walks the stack before a call that cannot.
  [[gnu::noinline, gnu::no_sanitize("address")]] static void JumpTo(Place* place) {
    asm volatile("" : "+r"(place));
    if (place != nullptr) __builtin_longjmp(place->registers, 1);
  }

  void Resume(LaneState* lane) {
    if (__builtin_setjmp(scheduler_.registers) != 0) return;
    if (lane->has_begun) JumpTo(&lane->context);
    lane->has_begun = true;
    setcontext(&lane->entry);
  }

  inline static EmulatedWarp* current_ = nullptr;
  std::array<LaneState, 32> lanes_;
  std::array<Words, 2> words_{};
  std::size_t generation_ = 0;
  Place scheduler_;
  const std::function<void()>* body_ = nullptr;
  int lane_ = 0;
};

}  // namespace zcomm::cuda
