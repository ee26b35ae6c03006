#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/isa.h"
#include "zcomm/message_layout.h"

namespace zcomm {

// Elements that the operations keep in the first-level cache between two kernels. Even, as a byte holds two int4 codes.
inline constexpr std::size_t kTileNumel = 2048;

// Elements [begin, begin + numel) of one segment of one message. `begin` is even.
struct CodeRange {
  const std::uint8_t* scales;  // of the segment: bf16, 2 bytes each; unused by cast codecs
  const std::uint8_t* codes;   // of the segment
  std::size_t block;
  std::size_t begin;
  std::size_t numel;
};

// The inner loops, compiled once for each ISA level from block_kernels_impl.h. Nothing here checks its arguments.
struct BlockKernels {
  // Quantizes consecutive blocks of one segment (the last may be short): 2 bytes of scale each, codes packed.
  using QuantizeFn = void (*)(const void* x, std::size_t numel, std::size_t block, std::uint8_t* scales,
                              std::uint8_t* codes);
  // Stores decoded values, |d| <= limit for block codecs; decode_add adds them to floats.
  using DecodeFn = void (*)(const CodeRange& range, float limit, void* out);
  // Rounds to nearest, ties to even, overflow to infinity.
  using ConvertFn = void (*)(const void* in, std::size_t numel, void* out);

  QuantizeFn quantize[kNumCodecs][kNumDTypes];  // null for cast codecs
  DecodeFn decode[kNumCodecs][kNumDTypes];
  DecodeFn decode_add[kNumCodecs];
  ConvertFn convert[kNumDTypes][kNumDTypes];  // [from][to]
  void (*divide)(float* values, std::size_t numel, float divisor);
  // Copies past the caches: for outputs larger than them, where a plain store would first read the line.
  void (*stream)(void* out, const void* in, std::size_t nbytes);
};

const BlockKernels& BaselineKernels();
#ifdef ZCOMM_X86
const BlockKernels& Avx2Kernels();
const BlockKernels& Avx512Kernels();
#endif

// The kernels of ActiveIsa().
const BlockKernels& ActiveKernels();

}  // namespace zcomm
