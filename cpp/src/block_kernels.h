#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/isa.h"
#include "zcomm/message_layout.h"
#include "zcomm/optimizer_step.h"
#include "zcomm/random.h"

namespace zcomm {

// Elements that the operations keep in the first-level cache between two kernels. Even, because a byte holds two 4-bit
// codes.
inline constexpr std::size_t kTileNumel = 2048;

// Elements [begin, begin + numel) of one segment of `count` messages. `begin` is even.
struct CodeRange {
  const std::uint8_t* headers;  // of the segment in the first message; unused by cast codecs
  const std::uint8_t* codes;    // of the segment in the first message
  std::size_t stride_nbytes;    // from one message to the next
  std::size_t count;
  std::size_t block;
  std::size_t begin;
  std::size_t numel;
};

// The float32 arrays of an optimizer step; null where the rule has none.
struct StepArrays {
  float* param;
  const float* grad;
  float* moment1;
  float* moment2;
  float* largest;
};

// The inner loops, compiled once for each ISA level from block_kernels_impl.h. ActiveKernels chooses the level. The
// kernels check no arguments, and use only the calling thread.
struct BlockKernels {
  // Quantizes consecutive blocks of one segment (the last may be short): writes headers and packed codes.
  using QuantizeFn = void (*)(const void* x, std::size_t numel, std::size_t block, std::uint8_t* headers,
                              std::uint8_t* codes);
  // The same for float32 with stochastic rounding; uniform[i] is the random number of x[i].
  using QuantizeAtRandomFn = void (*)(const float* x, const float* uniform, std::size_t numel, std::size_t block,
                                      std::uint8_t* headers, std::uint8_t* codes);
  // out = sum of the messages' values / divisor. For block codecs each value is first clamped to +-limit.
  using DecodeSumFn = void (*)(const CodeRange& range, float limit, float divisor, void* out);
  // Converts elements: to nearest, ties to even, overflow to infinity.
  using ConvertFn = void (*)(const void* in, std::size_t numel, void* out);

  QuantizeFn quantize[kNumCodecs][kNumDTypes];        // null for cast codecs
  QuantizeAtRandomFn quantize_at_random[kNumCodecs];  // null except for int codecs
  DecodeSumFn decode_sum[kNumCodecs][kNumDTypes];
  ConvertFn convert[kNumDTypes][kNumDTypes];  // [from][to]
  // The random numbers of elements element, element + 1, ...
  void (*uniform)(const Draw& draw, std::uint64_t element, std::size_t numel, float* out);
  // Hadamard-rotates blocks of 2^k elements in place. Rotating back is the same, followed by a factor of 2^-k.
  void (*rotate)(float* values, std::size_t numel, std::size_t block);
  // values = values * factor, clamped to +-limit.
  void (*scale)(float* values, std::size_t numel, float factor, float limit);
  void (*add)(float* sum, const float* terms, std::size_t numel);
  void (*subtract)(float* values, const float* terms, std::size_t numel);
  void (*divide)(float* values, std::size_t numel, float divisor);
  // Copies with non-temporal stores, which bypass the caches: for outputs larger than these, where an ordinary store
  // would first read the line. They are weakly ordered: the caller needs a fence (parallel_rows.h).
  void (*stream)(void* out, const void* in, std::size_t nbytes);
  // One step of an optimizer, for each Rule.
  using StepFn = void (*)(const StepOptions& options, const StepArrays& arrays, std::size_t numel);
  StepFn step[kNumRules];
  // float32 to bfloat16 with stochastic rounding; `uniform` holds integers in [0, 2^24).
  void (*round_at_random)(const float* values, const float* uniform, std::size_t numel, void* out);
};

const BlockKernels& BaselineKernels();
#ifdef ZCOMM_X86
const BlockKernels& Avx2Kernels();
const BlockKernels& Avx512Kernels();
#endif

// The kernels of ActiveIsa(), chosen once in a process. Every operation gets its kernels here.
const BlockKernels& ActiveKernels();

}  // namespace zcomm
