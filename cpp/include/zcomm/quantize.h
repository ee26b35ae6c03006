#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Writes `output.count` messages from the rows of `input` (message i from the rows of message i), whole: headers,
// codes, padding, trailer with output.layout_hash and checksum 0. The arithmetic is the numerics contract N1 to N9 of
// zcomm/_formats/reference.py, in float32; for a block b of a symmetric codec, in short:
//
//   absmax = max |x| over b        scale[b] = absmax / qmax rounded up to bf16        code = nearest code of x / scale
//
// A NaN or infinity in b: scale NaN, codes 0. A cast codec rounds each element to nearest.
//
// `draw`, unless null: int codecs round stochastically, with the random number of the element at message *
// message_stride + segment * segment_stride + e; other codecs ignore it.
//
// Throws std::invalid_argument on bad arguments (CheckRows, CheckMessages, CheckThreads). Thread-safe. `input` and
// `output` must not overlap. The bits do not depend on num_threads, the ISA level or denormal modes.
void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output, const Draw* draw,
              std::size_t num_threads);

// The same, element by element without vectors, tiles or threads: the oracle.
void QuantizeRef(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output, const Draw* draw);

}  // namespace zcomm
