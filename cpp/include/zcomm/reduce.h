#pragma once

#include <cstddef>

#include "zcomm/arrays.h"
#include "zcomm/message_layout.h"
#include "zcomm/random.h"

namespace zcomm {

// Sums of at least one message, in message order and float32: ((d_0 + d_1) + d_2) + ..., where d_i is message i decoded
// to float32 by Decode (so a term of a block codec is finite or NaN). The order is fixed because float addition is not
// associative. Sums are not clamped: one that overflows becomes infinite and stays so.
//
// Throws std::invalid_argument on bad arguments and on a wrong trailer (CheckTrailers), before anything is written.
// Thread-safe. Inputs and outputs must not overlap. The bits do not depend on num_threads, the ISA level or denormal
// modes; NaNs count as equal.

// output = sum / divisor: one IEEE division in float32 (none for divisor 1), rounded to output.dtype. Segment s goes to
// output.data[s * output.segment_stride]; output.message_stride is unused.
void DecodeSum(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor,
               std::size_t num_threads);

// Segment s of the sum becomes message s of `output`, quantized as by Quantize. With a `draw`, element e of segment s
// uses random number s * layout.segment_numel + e. `out_layout` has one segment of layout.segment_numel, and
// output.count is layout.num_segments.
void DecodeSumRequantize(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                         const MutableMessages& output, const Draw* draw, std::size_t num_threads);

// The oracles of tests: the same bits, element by element, without vectors, tiles or threads.
void DecodeSumRef(const MessageLayout& layout, const ConstMessages& input, const MutableRows& output, float divisor);
void DecodeSumRequantizeRef(const MessageLayout& layout, const ConstMessages& input, const MessageLayout& out_layout,
                            const MutableMessages& output, const Draw* draw);

}  // namespace zcomm
