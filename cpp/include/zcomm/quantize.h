#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"

namespace zcomm {

// Writes `output.count` messages from the rows of `input` (message i from the rows of message i), whole: scales, codes,
// padding, trailer with output.layout_hash and checksum 0. For a block b of a block codec:
//
//   absmax = max |x| over b (float32)      scale[b] = absmax / qmax rounded up to bf16      code = rint(x * (1 /
//   scale))
//
// rint is half to even; quotient, reciprocal and product are each rounded to float32. absmax < 2^-100: scale and codes
// 0. A NaN or infinity in b: scale NaN, codes 0. A cast codec rounds each element to nearest.
//
// Throws std::invalid_argument on bad arguments (CheckRows, CheckMessages, CheckThreads). Thread-safe. `input` and
// `output` must not overlap. The bits do not depend on num_threads nor on the ISA level.
void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output,
              std::size_t num_threads);

// The same, element by element without vectors, tiles or threads: the oracle.
void QuantizeRef(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output);

}  // namespace zcomm
