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

DType WidthOf(MomentFormat format) { return format == MomentFormat::kFloat32 ? DType::kFloat32 : DType::kBfloat16; }

void Check(const StepOptions& options, const Shard& shard, bool has_draw) {
  ZCOMM_CHECK(static_cast<std::size_t>(options.rule) < kNumRules,
              "unknown rule: rule=", static_cast<int>(options.rule));
  if (shard.numel == 0) return;
  ZCOMM_CHECK(shard.param != nullptr && shard.grad != nullptr, "a step needs parameters and gradients");
  ZCOMM_CHECK(shard.moment1 != nullptr, "a step needs its first moment");
  ZCOMM_CHECK((shard.moment2 != nullptr) == HasSecondMoment(options.rule), "a second moment is Adam's, which needs it");
  ZCOMM_CHECK(shard.largest == nullptr || options.rule <= Rule::kAdamW, "amsgrad is Adam's");
  ZCOMM_CHECK(static_cast<std::size_t>(shard.moment_format) < kNumMomentFormats,
              "unknown format of moments: moment_format=", static_cast<int>(shard.moment_format));
  ZCOMM_CHECK(shard.moment_format == MomentFormat::kFloat32 || has_draw,
              "moments in bfloat16 or int8 need random numbers");
  CheckAligned(shard.param, DType::kFloat32, "param");
  CheckAligned(shard.grad, shard.grad_dtype, "grad");
  if (shard.moment_format != MomentFormat::kInt8) {
    CheckAligned(shard.moment1, WidthOf(shard.moment_format), "moment1");
    CheckAligned(shard.moment2, WidthOf(shard.moment_format), "moment2");
  }
  CheckAligned(shard.largest, DType::kFloat32, "largest");
  CheckAligned(shard.out, shard.out_dtype, "out");
}

// What one thread works on: float32 copies in the first-level cache of what rests in another type. Tiles are short so
// that the memory works while the square roots do: before each, the arrays' elements two tiles further are asked for
// (bench/results/cpu_adam.md).
class Tile {
 public:
  static constexpr std::size_t kNumel = 128;
  static constexpr std::size_t kMostNumel = kMomentBlock;
  static_assert(kMostNumel % kNumel == 0);

  Tile(const BlockKernels& kernels, const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw)
      : kernels_(kernels), options_(options), shard_(shard), draw_(draw) {}

  static std::size_t NumelOf(MomentFormat format) { return format == MomentFormat::kInt8 ? kMomentBlock : kNumel; }

  // Steps elements [begin, end) of the shard; `begin` is a multiple of a tile.
  void StepRange(std::size_t begin, std::size_t end) {
    const std::size_t tile = NumelOf(shard_.moment_format);
    for (std::size_t at = begin; at < end; at += tile) {
      const std::size_t next = at + kTilesAhead * tile;
      if (next < end) Prefetch(next, std::min(tile, end - next));
      Step(at, std::min(tile, end - at));
    }
  }

 private:
  static constexpr std::size_t kTilesAhead = 2;
  static constexpr std::size_t kLineNbytes = 64;

  // GCC takes a function that does nothing but prefetch for one without effect, and drops its calls; hence inline.
  [[gnu::always_inline]] static void PrefetchBytes(const void* data, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; i += kLineNbytes) {
      __builtin_prefetch(static_cast<const std::uint8_t*>(data) + i);
    }
  }

  [[gnu::always_inline]] static void PrefetchElements(const void* data, DType dtype, std::size_t begin,
                                                      std::size_t numel) {
    if (data != nullptr) PrefetchBytes(ElementAt(data, dtype, begin), numel * ItemSize(dtype));
  }

  [[gnu::always_inline]] void PrefetchMoment(void* moment, std::size_t begin, std::size_t numel) const {
    if (shard_.moment_format != MomentFormat::kInt8) {
      PrefetchElements(moment, WidthOf(shard_.moment_format), begin, numel);
    } else if (moment != nullptr) {
      PrefetchBytes(RecordsAt(moment, begin), MomentRecordsNbytes(numel));
    }
  }

  [[gnu::always_inline]] void Prefetch(std::size_t begin, std::size_t numel) const {
    PrefetchElements(shard_.param, DType::kFloat32, begin, numel);
    PrefetchElements(shard_.grad, shard_.grad_dtype, begin, numel);
    PrefetchMoment(shard_.moment1, begin, numel);
    PrefetchMoment(shard_.moment2, begin, numel);
    PrefetchElements(shard_.largest, DType::kFloat32, begin, numel);
    PrefetchElements(shard_.out, shard_.out_dtype, begin, numel);
  }

  void Step(std::size_t begin, std::size_t numel) {
    const bool narrow = shard_.moment_format != MomentFormat::kFloat32;
    const MomentKind kind = KindOfFirstMoment(options_.rule);
    StepArrays arrays{shard_.param + begin, grad_, nullptr, nullptr, nullptr};
    if (shard_.grad_dtype == DType::kFloat32) {
      arrays.grad = static_cast<const float*>(shard_.grad) + begin;
    } else {
      Convert(shard_.grad_dtype, DType::kFloat32, ElementAt(shard_.grad, shard_.grad_dtype, begin), numel, grad_);
    }
    arrays.moment1 = Moment(shard_.moment1, kind, begin, numel, moment1_);
    if (shard_.moment2 != nullptr) arrays.moment2 = Moment(shard_.moment2, kKindOfSecondMoment, begin, numel, moment2_);
    if (shard_.largest != nullptr) arrays.largest = shard_.largest + begin;
    kernels_.step[static_cast<std::size_t>(options_.rule)](options_, arrays, numel);
    if (narrow) Keep(moment1_, kind, 0, shard_.moment1, begin, numel);
    if (narrow && shard_.moment2 != nullptr) Keep(moment2_, kKindOfSecondMoment, 1, shard_.moment2, begin, numel);
    if (shard_.out != nullptr) {
      Convert(DType::kFloat32, shard_.out_dtype, arrays.param, numel, ElementAt(shard_.out, shard_.out_dtype, begin));
    }
  }

  void Convert(DType from, DType to, const void* in, std::size_t numel, void* out) const {
    kernels_.convert[Index(from)][Index(to)](in, numel, out);
  }

  static std::uint8_t* RecordsAt(void* moment, std::size_t begin) {
    return static_cast<std::uint8_t*>(moment) + MomentRecordsNbytes(begin);
  }

  float* Moment(void* moment, MomentKind kind, std::size_t begin, std::size_t numel, float* copy) const {
    if (shard_.moment_format == MomentFormat::kFloat32) return static_cast<float*>(moment) + begin;
    if (shard_.moment_format == MomentFormat::kInt8) {
      kernels_.decode_moments[Index(kind)](RecordsAt(moment, begin), numel, copy);
    } else {
      Convert(DType::kBfloat16, DType::kFloat32, ElementAt(moment, DType::kBfloat16, begin), numel, copy);
    }
    return copy;
  }

  void Keep(const float* values, MomentKind kind, std::uint32_t which, void* moment, std::size_t begin,
            std::size_t numel) {
    Draw draw = *draw_;
    draw.tensor += which;
    kernels_.uniform(draw, begin, numel, uniform_);
    if (shard_.moment_format == MomentFormat::kInt8) {
      kernels_.encode_moments[Index(kind)](values, uniform_, numel, RecordsAt(moment, begin));
    } else {
      kernels_.round_at_random(values, uniform_, numel, ElementAt(moment, DType::kBfloat16, begin));
    }
  }

  const BlockKernels& kernels_;
  const StepOptions& options_;
  const Shard& shard_;
  const std::optional<Draw>& draw_;
  alignas(64) float grad_[kMostNumel];
  alignas(64) float moment1_[kMostNumel];
  alignas(64) float moment2_[kMostNumel];
  alignas(64) float uniform_[kMostNumel];
};

}  // namespace

void OptimizerStep(const StepOptions& options, const Shard& shard, const std::optional<Draw>& draw,
                   std::size_t num_threads) {
  CheckThreads(num_threads);
  Check(options, shard, draw.has_value());
  const BlockKernels& kernels = ActiveKernels();
  const std::size_t unit = Tile::NumelOf(shard.moment_format);
  ParallelOverRows(1, shard.numel, unit, num_threads, [&](std::size_t, std::size_t begin, std::size_t end) {
    Tile(kernels, options, shard, draw).StepRange(begin, end);
  });
}

}  // namespace zcomm
