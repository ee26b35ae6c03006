#include "zcomm/optimizer_step.h"

#include <algorithm>

#include "parallel_rows.h"
#include "tiles.h"
#include "zcomm/check.h"

namespace zcomm {
namespace {

void CheckAligned(const void* data, DType dtype, const char* name) {
  ZCOMM_CHECK(reinterpret_cast<std::uintptr_t>(data) % ItemSize(dtype) == 0, name,
              " must be aligned to its element type: address=", reinterpret_cast<std::uintptr_t>(data));
}

void Check(const StepOptions& options, const Shard& shard, bool has_draw) {
  ZCOMM_CHECK(static_cast<std::size_t>(options.rule) < kNumRules,
              "unknown rule: rule=", static_cast<int>(options.rule));
  if (shard.numel == 0) return;
  ZCOMM_CHECK(shard.param != nullptr && shard.grad != nullptr, "a step needs parameters and gradients");
  ZCOMM_CHECK(shard.moment1 != nullptr, "a step needs its first moment");
  ZCOMM_CHECK((shard.moment2 != nullptr) == HasSecondMoment(options.rule),
              "the second moment must be given if and only if the rule has one: rule=", static_cast<int>(options.rule));
  ZCOMM_CHECK(shard.largest == nullptr || options.rule <= Rule::kAdamW,
              "amsgrad needs Adam: rule=", static_cast<int>(options.rule));
  ZCOMM_CHECK(shard.moment_dtype == DType::kFloat32 || shard.moment_dtype == DType::kBfloat16,
              "moments are in float32 or bfloat16: moment_dtype=", static_cast<int>(shard.moment_dtype));
  ZCOMM_CHECK(shard.moment_dtype == DType::kFloat32 || has_draw, "moments in bfloat16 need random numbers");
  CheckAligned(shard.param, DType::kFloat32, "param");
  CheckAligned(shard.grad, shard.grad_dtype, "grad");
  CheckAligned(shard.moment1, shard.moment_dtype, "moment1");
  CheckAligned(shard.moment2, shard.moment_dtype, "moment2");
  CheckAligned(shard.largest, DType::kFloat32, "largest");
  CheckAligned(shard.out, shard.out_dtype, "out");
}

// The working set of one thread: float32 copies, in the first-level cache, of arrays that are stored in another type.
// Tiles are short so that memory accesses overlap the square roots: each tile first prefetches the elements two tiles
// ahead (measurements: bench/results/cpu_adam.md).
class Tile {
 public:
  static constexpr std::size_t kNumel = 128;

  Tile(const BlockKernels& kernels, const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw)
      : kernels_(kernels), options_(options), shard_(shard), draw_(draw) {}

  // Steps elements [begin, end) of the shard; `begin` is a multiple of a tile.
  void StepRange(std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += kNumel) {
      const std::size_t next = at + kTilesAhead * kNumel;
      if (next < end) Prefetch(next, std::min(kNumel, end - next));
      Step(at, std::min(kNumel, end - at));
    }
  }

 private:
  static constexpr std::size_t kTilesAhead = 2;
  static constexpr std::size_t kLineNbytes = 64;

  // always_inline: GCC treats a function that only prefetches as one without effects, and removes the calls.
  [[gnu::always_inline]] static void PrefetchElements(const void* data, DType dtype, std::size_t begin,
                                                      std::size_t numel) {
    if (data == nullptr) return;
    const void* first = ElementAt(data, dtype, begin);
    for (std::size_t i = 0; i < numel * ItemSize(dtype); i += kLineNbytes) {
      __builtin_prefetch(static_cast<const std::uint8_t*>(first) + i);
    }
  }

  [[gnu::always_inline]] void Prefetch(std::size_t begin, std::size_t numel) const {
    PrefetchElements(shard_.param, DType::kFloat32, begin, numel);
    PrefetchElements(shard_.grad, shard_.grad_dtype, begin, numel);
    PrefetchElements(shard_.moment1, shard_.moment_dtype, begin, numel);
    PrefetchElements(shard_.moment2, shard_.moment_dtype, begin, numel);
    PrefetchElements(shard_.largest, DType::kFloat32, begin, numel);
    PrefetchElements(shard_.out, shard_.out_dtype, begin, numel);
  }

  void Step(std::size_t begin, std::size_t numel) {
    const bool narrow = shard_.moment_dtype != DType::kFloat32;
    StepArrays arrays{shard_.param + begin, grad_, nullptr, nullptr, nullptr};
    if (shard_.grad_dtype == DType::kFloat32) {
      arrays.grad = static_cast<const float*>(shard_.grad) + begin;
    } else {
      Convert(shard_.grad_dtype, DType::kFloat32, ElementAt(shard_.grad, shard_.grad_dtype, begin), numel, grad_);
    }
    arrays.moment1 = Moment(shard_.moment1, begin, numel, moment1_);
    if (shard_.moment2 != nullptr) arrays.moment2 = Moment(shard_.moment2, begin, numel, moment2_);
    if (shard_.largest != nullptr) arrays.largest = shard_.largest + begin;
    kernels_.step[static_cast<std::size_t>(options_.rule)](options_, arrays, numel);
    if (narrow) StoreMoment(moment1_, 0, shard_.moment1, begin, numel);
    if (narrow && shard_.moment2 != nullptr) StoreMoment(moment2_, 1, shard_.moment2, begin, numel);
    if (shard_.out != nullptr) {
      Convert(DType::kFloat32, shard_.out_dtype, arrays.param, numel, ElementAt(shard_.out, shard_.out_dtype, begin));
    }
  }

  void Convert(DType from, DType to, const void* in, std::size_t numel, void* out) const {
    kernels_.convert[Index(from)][Index(to)](in, numel, out);
  }

  float* Moment(void* moment, std::size_t begin, std::size_t numel, float* copy) const {
    if (shard_.moment_dtype == DType::kFloat32) return static_cast<float*>(moment) + begin;
    Convert(DType::kBfloat16, DType::kFloat32, ElementAt(moment, DType::kBfloat16, begin), numel, copy);
    return copy;
  }

  void StoreMoment(const float* values, std::uint32_t which, void* moment, std::size_t begin, std::size_t numel) {
    Draw draw = *draw_;
    draw.tensor += which;
    kernels_.uniform(draw, begin, numel, uniform_);
    kernels_.round_at_random(values, uniform_, numel, ElementAt(moment, DType::kBfloat16, begin));
  }

  const BlockKernels& kernels_;
  const StepOptions& options_;
  const Shard& shard_;
  const std::optional<Draw>& draw_;
  alignas(64) float grad_[kNumel];
  alignas(64) float moment1_[kNumel];
  alignas(64) float moment2_[kNumel];
  alignas(64) float uniform_[kNumel];
};

}  // namespace

void OptimizerStep(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw,
                   std::size_t num_threads) {
  CheckThreads(num_threads);
  Check(options, shard, draw.has_value());
  const BlockKernels& kernels = ActiveKernels();
  ParallelOverRows(1, shard.numel, Tile::kNumel, num_threads, [&](std::size_t, std::size_t begin, std::size_t end) {
    Tile(kernels, options, shard, draw).StepRange(begin, end);
  });
}

}  // namespace zcomm
