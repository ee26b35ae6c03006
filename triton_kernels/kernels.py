"""The kernels: one launch for a batch of messages, which also writes the messages' padding and trailers.

Arguments, in elements where nothing else is said:

    message_stride, segment_stride   where message i, segment s lies in an array: i * message_stride + s * segment_stride
    num_segments, segment_numel      of a message
    pitch                            from one message to the next: bytes, or elements of a cast codec's dtype
    segment_nbytes, codes_offset     bytes of a segment's codes, and where the codes begin in a message
    layout_hash                      the 32 bits of a message's trailer, as int32
    is_valid_ptr                     int32 [1], cleared where a message has another hash
    TILE                             elements that a program handles, at least one block
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import clamped_to, divided, narrowed, widened
from .codecs import encode_tile
from .tiles import (
    check_hash,
    elements_of,
    load_array,
    load_message,
    locate,
    rotated_where_whole,
    store_array,
    store_ends,
    store_message,
    uniform_of,
)

@triton.jit
def encode_and_store(
    message_ptr, segment, tile, remaining, shape, values, uniform, KIND: tl.constexpr, BITS: tl.constexpr,
    QMAX: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr, IS_RANDOM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Encode a tile of values, which are 0 where there is no element, into the message at ``message_ptr``."""
    _, mask = elements_of(remaining, BLOCK, ROWS, COLS)
    if ROTATED:
        values = rotated_where_whole(values, remaining, BLOCK, ROWS)
    headers, codes, _ = encode_tile(values, mask, uniform, KIND, QMAX, IS_RANDOM)
    store_message(message_ptr, segment, tile, remaining, shape, headers, codes, KIND, BITS, BLOCK, ROWS, COLS)


@triton.jit(do_not_specialize=["layout_hash", "seed", "tensor", "step", "hop", "rank"])
def quantize_kernel(
    x_ptr, held_ptr, out_ptr, message_stride, segment_stride, num_segments, segment_numel,
    pitch, segment_nbytes, codes_offset, layout_hash, seed, tensor, step, hop, rank, first,
    KIND: tl.constexpr, BITS: tl.constexpr, QMAX: tl.constexpr, HEADER_NBYTES: tl.constexpr, BLOCK: tl.constexpr,
    COLS: tl.constexpr, ROTATED: tl.constexpr, RANDOM: tl.constexpr, DELTA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Messages of a block codec from the array x, or from x - held."""
    ROWS: tl.constexpr = TILE // COLS if TILE > COLS else 1
    message, segment, tile, remaining = locate(num_segments, segment_numel, BLOCK, ROWS)
    shape = (segment_numel, segment_nbytes, codes_offset)
    start = message * message_stride + segment * segment_stride + tile * (BLOCK * ROWS)
    values = load_array(x_ptr, start, remaining, BLOCK, ROWS, COLS)
    if DELTA:
        values = values - load_array(held_ptr, start, remaining, BLOCK, ROWS, COLS)
    uniform = uniform_of(start + first, (seed, tensor, step, hop, rank), BLOCK, ROWS, COLS, RANDOM)
    message_ptr = out_ptr + message * pitch
    encode_and_store(
        message_ptr, segment, tile, remaining, shape, values, uniform, KIND, BITS, QMAX, BLOCK, ROTATED,
        RANDOM != "", ROWS, COLS,
    )  # fmt: skip
    if (tile == 0) & (segment == 0):
        store_ends(message_ptr, pitch, num_segments, shape, layout_hash, HEADER_NBYTES, BLOCK)


@triton.jit(do_not_specialize=["layout_hash"])
def decode_kernel(
    messages_ptr, out_ptr, is_valid_ptr, message_stride, segment_stride, num_segments, segment_numel,
    pitch, segment_nbytes, codes_offset, layout_hash,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, ROTATED: tl.constexpr,
    ADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The values of messages into the array out, or added to it."""
    ROWS: tl.constexpr = TILE // COLS if TILE > COLS else 1
    message, segment, tile, remaining = locate(num_segments, segment_numel, BLOCK, ROWS)
    shape = (segment_numel, segment_nbytes, codes_offset)
    message_ptr = messages_ptr + message * pitch
    values = load_message(message_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS, COLS)
    start = message * message_stride + segment * segment_stride + tile * (BLOCK * ROWS)
    if ADDED:
        values = load_array(out_ptr, start, remaining, BLOCK, ROWS, COLS) + values
    elif KIND != "cast":
        values = clamped_to(values, out_ptr.dtype.element_ty)
    store_array(out_ptr, start, values, remaining, BLOCK, ROWS, COLS)
    if KIND != "cast":
        if (tile == 0) & (segment == 0):
            check_hash(message_ptr, pitch, layout_hash, is_valid_ptr)


@triton.jit
def cast_kernel(
    x_ptr, out_ptr, message_stride, segment_stride, out_message_stride, out_segment_stride, num_segments,
    segment_numel, TILE: tl.constexpr,
):  # fmt: skip
    """Copy an array of segments to another, converting its dtype."""
    message, segment, tile, remaining = locate(num_segments, segment_numel, TILE, 1)
    offsets = tl.arange(0, TILE)
    mask = offsets < remaining
    source = x_ptr + (message * message_stride + segment * segment_stride + tile * TILE)
    target = out_ptr + (message * out_message_stride + segment * out_segment_stride + tile * TILE)
    values = widened(tl.load(source + offsets, mask=mask))
    tl.store(target + offsets, narrowed(values, out_ptr.dtype.element_ty), mask=mask)
