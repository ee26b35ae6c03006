#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Elements in a block of a residual.
inline constexpr std::size_t kResidualBlock = 256;

// The residual of error feedback: what earlier encodings lost, one row for each message, in int8 blocks of
// kResidualBlock. Block b of row i has the bf16 scale scales[i * scales_stride + b] and the codes from
// codes[i * codes_stride + b * kResidualBlock] on. Strides are in elements. Not owned.
struct ResidualRows {
  std::int8_t* codes;
  std::size_t codes_stride;
  std::uint16_t* scales;
  std::size_t scales_stride;
  float beta;
};

// Whether messages of `layout` can have a residual: a block codec whose blocks do not straddle those of a residual.
bool CanHaveResidual(const MessageLayout& layout);

// Both functions make one pass over the data, with the arithmetic N10 of zcomm/_formats/reference.py:
//
//   u = x + beta * row i        message i = Quantize(u)        row i = u - Decode(message i)
//
// Blocks of the residual in which a value is not finite keep their old contents.
//
// The output's layout has one segment and CanHaveResidual holds for it. Throws std::invalid_argument on bad arguments
// and on a wrong trailer, before anything is written. Thread-safe. No two buffers may overlap. The bits do not depend
// on num_threads, the ISA level or denormal modes; NaNs count as equal.

// Quantize (quantize.h) with a residual.
void QuantizeWithResidual(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                          const ResidualRows& residual, const Draw* draw, std::size_t num_threads);

// DecodeSumRequantize (reduce.h) with a residual.
void DecodeSumRequantizeWithResidual(const MessageLayout& layout, const ConstMessages& input,
                                     const MessageLayout& out_layout, const MutableMessages& output,
                                     const ResidualRows& residual, const Draw* draw, std::size_t num_threads);

}  // namespace zcomm
