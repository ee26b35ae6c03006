#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"

namespace zcomm {

// Decodes `input.count` messages into the rows of `output` (message i into the rows of message i).
//
//   block codec:  value of the code in float32 (N4 to N9 of zcomm/_formats/reference.py), clamped to the finite range
//                 of output.dtype, then rounded to it; a NaN scale gives NaN
//   cast codec:   the element rounded to output.dtype to nearest, overflow to infinity
//
// Throws std::invalid_argument on bad arguments and on a wrong trailer (CheckTrailers), before anything is written.
// Thread-safe. `input` and `output` must not overlap. The bits do not depend on num_threads, the ISA level or denormal
// modes; NaNs count as equal.
void Decode(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
            std::size_t num_threads);

// The oracle of tests: the same bits, element by element, without vectors, tiles or threads.
void DecodeRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output);

}  // namespace zcomm
