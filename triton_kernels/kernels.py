"""The kernels: one launch encodes or decodes a batch of messages, with their padding and trailers.

Arguments, in elements unless stated otherwise:

    message_stride, segment_stride   message i, segment s of an array is at i * message_stride + s * segment_stride
    num_segments, segment_numel      segments of a message, elements of a segment
    pitch                            from one message to the next: bytes, or elements of a cast codec's dtype
    segment_nbytes, codes_offset     bytes of a segment's codes, and the codes' offset in a message
    layout_hash                      the 32 bits in a message's trailer, as int32
    num_messages                     messages to be summed, in their order
    residual_codes, _scales          residual: one row of blocks for each segment of a message
    seed ... rank, first             random numbers; see zcomm._formats.philox
    is_valid_ptr                     int32 [1], cleared if a message has another hash
    refused_ptr                      int32 [1], written by a sum for the next quantize: 0 if all hashes match; or None
    expected_ptr, num_expected       the receive buffer of the next exchange: its trailers are cleared, except those of
                                     messages own_start to own_stop, which are being written
    TILE                             elements per program, at least one block
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import FLOAT32_MAX, divided
from .codecs import encode_pairs, encode_tile
from .residuals import RESIDUAL_BLOCK, load_residual, store_residual
from .tiles import (
    check_hashes,
    clear_trailers,
    decoded_tile,
    elements_of,
    load_array,
    load_message,
    load_pairs,
    load_sum,
    locate,
    rotated_where_whole,
    store_array,
    store_ends,
    store_message,
    uniform_of,
)

WORDS = ("seed", "tensor", "step", "hop", "rank", "num_expected", "own_start", "own_stop")
"""Arguments on whose values no kernel is specialized: they change from call to call, and would recompile it."""


@triton.jit
def encode_and_store(
    message_ptr, segment, tile, remaining, shape, values, uniform, residual_codes_ptr, residual_scales_ptr, beta,
    KIND: tl.constexpr, BITS: tl.constexpr, QMAX: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    IS_RANDOM: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Encode a tile of values, which are 0 where there is no element, into the message at ``message_ptr``.

    With ``RESIDUAL``, that of the tile's row is added, times ``beta``, and what encoding loses replaces it.
    """
    _, mask = elements_of(remaining, BLOCK, ROWS, COLS)
    RESIDUAL_ROWS: tl.constexpr = BLOCK * ROWS // RESIDUAL_BLOCK
    if RESIDUAL:
        residual = load_residual(residual_codes_ptr, residual_scales_ptr, tile, remaining, RESIDUAL_ROWS)
        values = values + tl.reshape(residual * beta, (ROWS, COLS))
    whole = values
    if ROTATED:
        whole = rotated_where_whole(values, remaining, BLOCK, ROWS)
    headers, codes, _ = encode_tile(whole, mask, uniform, KIND, BITS, QMAX, IS_RANDOM)
    store_message(message_ptr, segment, tile, remaining, shape, headers, codes, KIND, BITS, BLOCK, ROWS, COLS, False)
    if RESIDUAL:
        lost = values - decoded_tile(headers, codes, remaining, KIND, BITS, BLOCK, ROTATED, ROWS, FLOAT32_MAX)
        lost = tl.reshape(tl.where(mask, lost, 0.0), (RESIDUAL_ROWS, RESIDUAL_BLOCK))
        store_residual(residual_codes_ptr, residual_scales_ptr, tile, remaining, lost, RESIDUAL_ROWS)


@triton.jit(do_not_specialize=["layout_hash", *WORDS])
def quantize_kernel(
    x_ptr, held_ptr, refused_ptr, out_ptr, message_stride, segment_stride, num_segments, segment_numel, pitch,
    segment_nbytes, codes_offset, layout_hash, residual_codes_ptr, residual_scales_ptr, residual_codes_stride,
    residual_scales_stride, beta, seed, tensor, step, hop, rank, first, expected_ptr, num_expected, own_start, own_stop,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, ROTATED: tl.constexpr,
    QMAX: tl.constexpr, HEADER_NBYTES: tl.constexpr, RANDOM: tl.constexpr, RESIDUAL: tl.constexpr,
    DELTA: tl.constexpr, PAIRED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Messages of a block codec from the array x, or from x - held. With PAIRED of two elements of x at a time.

    Where refused is not 0, as decode_sum_kernel left it with the sum x, they get hash 0: see requantize_kernel.
    """
    ROWS: tl.constexpr = TILE // COLS if TILE > COLS else 1
    message, segment, tile, remaining = locate(num_segments, segment_numel, BLOCK, ROWS)
    shape = (segment_numel, segment_nbytes, codes_offset)
    start = message * message_stride + segment * segment_stride + tile * (BLOCK * ROWS)
    message_ptr = out_ptr + message * pitch
    if PAIRED:
        low, high = load_pairs(x_ptr, start, remaining, BLOCK, ROWS, COLS)
        headers, codes = encode_pairs(low, high, KIND, QMAX)
        store_message(message_ptr, segment, tile, remaining, shape, headers, codes, KIND, BITS, BLOCK, ROWS, COLS, True)
    else:
        values = load_array(x_ptr, start, remaining, BLOCK, ROWS, COLS)
        if DELTA:
            values = values - load_array(held_ptr, start, remaining, BLOCK, ROWS, COLS)
        uniform = uniform_of(start + first, (seed, tensor, step, hop, rank), BLOCK, ROWS, COLS, RANDOM)
        if RESIDUAL:
            residual_codes_ptr += (message * num_segments + segment) * residual_codes_stride
            residual_scales_ptr += (message * num_segments + segment) * residual_scales_stride
        encode_and_store(
            message_ptr, segment, tile, remaining, shape, values, uniform, residual_codes_ptr, residual_scales_ptr,
            beta, KIND, BITS, QMAX, BLOCK, ROTATED, RANDOM != "", RESIDUAL, ROWS, COLS,
        )  # fmt: skip
    if (tile == 0) & (segment == 0):
        if refused_ptr is not None:
            layout_hash = tl.where(tl.load(refused_ptr) == 0, layout_hash, 0)
        store_ends(message_ptr, pitch, num_segments, shape, layout_hash, HEADER_NBYTES, BLOCK)
    clear_trailers(expected_ptr, num_expected, own_start, own_stop, pitch)


@triton.jit(do_not_specialize=["in_hash", "layout_hash", *WORDS])
def requantize_kernel(
    in_ptr, is_valid_ptr, out_ptr, num_messages, num_segments, segment_numel, in_pitch,
    in_segment_nbytes, in_codes_offset, in_hash, pitch, segment_nbytes, codes_offset, layout_hash,
    residual_codes_ptr, residual_scales_ptr, residual_codes_stride, residual_scales_stride, beta, seed, tensor, step,
    hop, rank, first, expected_ptr, num_expected, own_start, own_stop,
    IN_KIND: tl.constexpr, IN_BITS: tl.constexpr, IN_BLOCK: tl.constexpr, IN_COLS: tl.constexpr,
    IN_ROTATED: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
    ROTATED: tl.constexpr, QMAX: tl.constexpr, HEADER_NBYTES: tl.constexpr, RANDOM: tl.constexpr,
    RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum of messages, in their order; segment s of it becomes message s of a block codec, one segment each.

    If one is refused, those that are written get hash 0: whoever receives them refuses them, too.
    A tile is a whole number of blocks of both codecs: they are equal, or powers of two.
    """
    ROWS: tl.constexpr = TILE // COLS if TILE > COLS else 1
    IN_ROWS: tl.constexpr = TILE // IN_COLS if TILE > IN_COLS else 1
    _, segment, tile, remaining = locate(num_segments, segment_numel, BLOCK, ROWS)
    in_shape = (segment_numel, in_segment_nbytes, in_codes_offset)
    values = load_sum(
        in_ptr, num_messages, in_pitch, segment, tile, remaining, in_shape, IN_KIND, IN_BITS, IN_BLOCK, IN_ROTATED,
        IN_ROWS, IN_COLS,
    )  # fmt: skip
    _, mask = elements_of(remaining, BLOCK, ROWS, COLS)
    values = tl.where(mask, tl.reshape(values, (ROWS, COLS)), 0.0)  # a code 0 need not mean the value 0
    start = segment * segment_numel + tile * (BLOCK * ROWS) + first
    uniform = uniform_of(start, (seed, tensor, step, hop, rank), BLOCK, ROWS, COLS, RANDOM)
    message_ptr = out_ptr + segment * pitch
    if RESIDUAL:
        residual_codes_ptr += segment * residual_codes_stride
        residual_scales_ptr += segment * residual_scales_stride
    shape = (segment_numel, segment_nbytes, codes_offset)
    encode_and_store(
        message_ptr, 0, tile, remaining, shape, values, uniform, residual_codes_ptr, residual_scales_ptr, beta,
        KIND, BITS, QMAX, BLOCK, ROTATED, RANDOM != "", RESIDUAL, ROWS, COLS,
    )  # fmt: skip
    if tile == 0:
        # each program that writes a trailer looks for itself, for programs do not wait for each other
        difference = check_hashes(in_ptr, num_messages, in_pitch, in_hash, is_valid_ptr, IN_KIND)
        layout_hash = tl.where(difference == 0, layout_hash, 0)
        store_ends(message_ptr, pitch, 1, shape, layout_hash, HEADER_NBYTES, BLOCK)
    clear_trailers(expected_ptr, num_expected, own_start, own_stop, pitch)


@triton.jit(do_not_specialize=["layout_hash"])
def decode_kernel(
    messages_ptr, out_ptr, is_valid_ptr, message_stride, segment_stride, num_segments, segment_numel,
    pitch, segment_nbytes, codes_offset, layout_hash,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, ROTATED: tl.constexpr,
    ADDED: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The values of messages, clamped to [-LARGEST, LARGEST], into the array out, or added to it."""
    ROWS: tl.constexpr = TILE // COLS if TILE > COLS else 1
    message, segment, tile, remaining = locate(num_segments, segment_numel, BLOCK, ROWS)
    shape = (segment_numel, segment_nbytes, codes_offset)
    message_ptr = messages_ptr + message * pitch
    values = load_message(message_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS, COLS, LARGEST)
    start = message * message_stride + segment * segment_stride + tile * (BLOCK * ROWS)
    if ADDED:
        values = load_array(out_ptr, start, remaining, BLOCK, ROWS, COLS) + values
    store_array(out_ptr, start, values, remaining, BLOCK, ROWS, COLS)
    if (tile == 0) & (segment == 0):
        check_hashes(message_ptr, 1, pitch, layout_hash, is_valid_ptr, KIND)


@triton.jit(do_not_specialize=["layout_hash"])
def decode_sum_kernel(
    messages_ptr, out_ptr, is_valid_ptr, refused_ptr, segment_stride, num_messages, factor, num_segments,
    segment_numel, pitch, segment_nbytes, codes_offset, layout_hash,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr, ROTATED: tl.constexpr,
    DIVIDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum of messages, in their order: as it is, or by DIVIDED over ``factor`` or times it."""
    ROWS: tl.constexpr = TILE // COLS if TILE > COLS else 1
    _, segment, tile, remaining = locate(num_segments, segment_numel, BLOCK, ROWS)
    shape = (segment_numel, segment_nbytes, codes_offset)
    total = load_sum(
        messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS, COLS
    )
    if DIVIDED == "by product":
        total = total * factor
    elif DIVIDED == "by division":
        total = divided(total, factor)
    store_array(out_ptr, segment * segment_stride + tile * (BLOCK * ROWS), total, remaining, BLOCK, ROWS, COLS)
    if (tile == 0) & (segment == 0):
        difference = check_hashes(messages_ptr, num_messages, pitch, layout_hash, is_valid_ptr, KIND)
        if refused_ptr is not None:
            tl.store(refused_ptr, difference)


@triton.jit
def cast_kernel(
    x_ptr, held_ptr, out_ptr, message_stride, segment_stride, out_message_stride, out_segment_stride, num_segments,
    segment_numel, DELTA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy an array of segments, or x - held, to another, converting its dtype."""
    message, segment, tile, remaining = locate(num_segments, segment_numel, TILE, 1)
    start = message * message_stride + segment * segment_stride + tile * TILE
    values = load_array(x_ptr, start, remaining, TILE, 1, TILE)
    if DELTA:
        values = values - load_array(held_ptr, start, remaining, TILE, 1, TILE)
    start = message * out_message_stride + segment * out_segment_stride + tile * TILE
    store_array(out_ptr, start, values, remaining, TILE, 1, TILE)
