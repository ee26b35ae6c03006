#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Sums in message order, in float32: sum = d_0, then + d_1, + d_2, ..., where d_i is message i decoded to float32 as by
// Decode (so a term of a block codec is finite or NaN). Sums are not clamped: an overflow is infinite and stays so.
// At least one message.
//
// Throws std::invalid_argument on bad arguments and on a wrong trailer (CheckTrailers), before anything is written.
// Thread-safe. Inputs and outputs must not overlap. The bits do not depend on num_threads, the
// ISA level or denormal modes.

// output = sum / divisor, one IEEE division in float32 (none for divisor 1), rounded to output.dtype; segment s at
// output.data[s * output.segment_stride]. output.message_stride is unused.
void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
               std::size_t num_threads);

// Segment s of the sum becomes message s of `output`, quantized as by Quantize; with a `draw`, element e of segment s
// has the random number of position s * layout.segment_numel + e. `out_layout` has one segment of layout.segment_numel;
// output.count is layout.num_segments.
void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                         const MutableMessages& output, const Draw* draw, std::size_t num_threads);

// The same, element by element without vectors, tiles or threads: the oracles.
void DecodeSumRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor);
void DecodeSumRequantizeRef(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                            const MutableMessages& output, const Draw* draw);

}  // namespace zcomm
