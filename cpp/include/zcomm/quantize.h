#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Encodes the rows of `input` into `output.count` messages (message i from the rows of message i). Writes every byte of
// a message: headers, codes, padding, and the trailer with output.layout_hash and checksum 0. The arithmetic is the
// numerics contract N1 to N9 of zcomm/_formats/reference.py, in float32. In short, for a block b of a symmetric codec:
//
//   absmax = max |x| over b        scale[b] = absmax / qmax rounded up to bf16        code = nearest code of x / scale
//
// If b holds a NaN or an infinity, its scale is NaN and its codes are 0. A cast codec rounds each element to nearest.
//
// If `draw` is not null, int codecs round stochastically: element e of a segment uses random number message *
// message_stride + segment * segment_stride + e. Other codecs ignore `draw`.
//
// Throws std::invalid_argument on bad arguments (CheckRows, CheckMessages, CheckThreads). Thread-safe. `input` and
// `output` must not overlap. The bits do not depend on num_threads, the ISA level or denormal modes; NaNs count as
// equal.
void Quantize(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output, const Draw* draw,
              std::size_t num_threads);

// The oracle of tests: the same bits, element by element, without vectors, tiles or threads.
void QuantizeRef(const MessageLayout& layout, const ConstRows& input, const MutableMessages& output, const Draw* draw);

}  // namespace zcomm
