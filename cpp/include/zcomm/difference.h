#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Deltas (N11 of zcomm/_formats/reference.py): changes since a value was last sent. Each function makes one pass over
// the data. Both throw std::invalid_argument on bad arguments and on a wrong trailer, before anything is written.
// Thread-safe. No two buffers may overlap. The bits do not depend on num_threads, the ISA level or denormal modes; NaNs
// count as equal.

// Encodes `input` - `held`, subtracted in float32, as Quantize does. `held` has input's strides.
void QuantizeDifference(const MessageLayout& layout, const ConstRows& input, DType held_dtype, const void* held,
                        const MutableMessages& output, const Draw* draw, std::size_t num_threads);

// output = RN(output + value): adds, in float32, what Decode would write to float32 rows; rounded to output.dtype.
void DecodeAdd(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output,
               std::size_t num_threads);

}  // namespace zcomm
