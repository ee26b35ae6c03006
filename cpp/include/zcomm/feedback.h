#pragma once

#include <cstddef>
#include <cstdint>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Elements of a residual's blocks.
inline constexpr std::size_t kResidualBlock = 256;

// What earlier encodings have lost, a row for each message, as int8 blocks of kResidualBlock: block b of row i has the
// bf16 scale scales[i * scales_stride + b] and the codes from codes[i * codes_stride + b * kResidualBlock] on. Strides
// in elements. Not owned.
struct ResidualRows {
  std::int8_t* codes;
  std::size_t codes_stride;
  std::uint16_t* scales;
  std::size_t scales_stride;
  float beta;
};

// Whether a residual can follow messages of `layout`: a block codec whose blocks do not straddle those of a residual.
bool MayKeepResidual(const MessageLayout& layout);

// Both are one pass over the data, with the arithmetic N10 of zcomm/_formats/reference.py: what is to become message i has beta x
// the residual's row i added before it is quantized, and the row takes what the message lacks of that. Blocks of a
// residual with a value that is not finite stay as they are.
//
// `layout` (the output's) has one segment, and MayKeepResidual. Throws std::invalid_argument on bad arguments and on a
// wrong trailer, before anything is written. Thread-safe. Nothing may overlap. The bits do not depend on num_threads,
// the ISA level or denormal modes.

// As Quantize.
void QuantizeWithResidual(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
                          const ResidualRows& residual, const Draw* draw, std::size_t num_threads);

// As DecodeSumRequantize.
void DecodeSumRequantizeWithResidual(const MessageLayout& layout, const ConstMessages& input,
                                     const MessageLayout& out_layout, const MutableMessages& output,
                                     const ResidualRows& residual, const Draw* draw, std::size_t num_threads);

}  // namespace zcomm
