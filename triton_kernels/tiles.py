"""Tiles: which part of an array or message a program handles, and loading and storing it.

A program handles one tile: ROWS consecutive blocks of one segment of one message (a *unit*), as [ROWS, COLS] with
COLS >= BLOCK a power of two. An offset is one int64 number for the tile plus an int32 number inside it, so that arrays
of more than 2^31 elements work.

    program -> unit = program / tiles of a segment -> message = unit / num_segments, segment = unit % num_segments
               tile = program % tiles of a segment -> first block = tile * ROWS

``pitch`` is a message's size: in bytes for block codecs, in elements for cast codecs, whose ``KIND`` is "cast".
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import (
    FLOAT32_MAX,
    INTERPRETED,
    UPPER_HALF,
    butterflies,
    clamped,
    float_of,
    narrowed,
    philox_word,
    philox_words,
    widened,
)
from .codecs import CLAMPED_FROM, FP8_CLAMPED_FROM, added_tile, decode_tile
from .ptx import capability


@triton.jit
def locate(num_segments, segment_numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Message, segment, tile (int64), and how many elements the segment has from the tile's first on (int32)."""
    tiles = tl.maximum(tl.cdiv(segment_numel, BLOCK * ROWS), 1).to(tl.int32)
    program = tl.program_id(0)
    unit = program // tiles
    message = unit // num_segments
    tile = (program - unit * tiles).to(tl.int64)
    segment = (unit - message * num_segments).to(tl.int64)
    return message.to(tl.int64), segment, tile, remaining_of(segment_numel, tile, BLOCK * ROWS)


@triton.jit
def remaining_of(total, tile, SIZE: tl.constexpr):
    """How much of ``total`` lies in and after a tile of ``SIZE``, at most ``SIZE``."""
    return tl.minimum(total - tile * SIZE, SIZE).to(tl.int32)


@triton.jit
def elements_of(remaining, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets int32 [ROWS, COLS] of a tile's elements from its first, and which of them exist."""
    cols = tl.arange(0, COLS)[None, :]
    offsets = tl.arange(0, ROWS)[:, None] * BLOCK + cols
    return offsets, (cols < BLOCK) & (offsets < remaining)


@triton.jit
def load_array(ptr, first, remaining, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Float32 [ROWS, COLS] from element ``first`` (int64) of an array of a floating dtype; 0 where there is none."""
    offsets, mask = elements_of(remaining, BLOCK, ROWS, COLS)
    return widened(tl.load(ptr + first + offsets, mask=mask, other=0.0))


@triton.jit
def load_pairs(ptr, first, remaining, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The even and the odd elements, float32 [ROWS, COLS / 2] each, from element ``first`` of a 16-bit array.

    ``first``, ``remaining`` and BLOCK are even, and ``ptr`` is aligned to 4 bytes.
    """
    offsets, mask = elements_of(remaining // 2, BLOCK // 2, ROWS, COLS // 2)
    words_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first // 2
    words = tl.load(words_ptr + offsets, mask=mask, other=0)
    if ptr.dtype.element_ty == tl.bfloat16:
        low, high = float_of(words << 16), float_of(words & UPPER_HALF)
    else:
        low = widened(words.to(tl.int16).to(tl.float16, bitcast=True))
        high = widened((words >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    return low, high


@triton.jit
def store_array(ptr, first, values, remaining, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Float32 [ROWS, COLS] into an array of a floating dtype, rounded half to even."""
    offsets, mask = elements_of(remaining, BLOCK, ROWS, COLS)
    tl.store(ptr + first + offsets, narrowed(values, ptr.dtype.element_ty), mask=mask)


@triton.jit
def uniform_of(first, draw, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, RANDOM: tl.constexpr):
    """Random numbers float32 [ROWS, COLS] in [0, 2^24) of the elements from int64 ``first`` on.

    ``draw``: seed, tensor, step, hop, rank. ``RANDOM`` is "" (none), "elements" or, where ``first`` and BLOCK are
    multiples of 4, "quads": then four elements share one evaluation of the generator.
    """
    rows = tl.arange(0, ROWS)[:, None] * BLOCK
    if RANDOM == "quads":
        quads = (first >> 2) + (rows // 4 + tl.arange(0, COLS // 4)[None, :])
        w0, w1, w2, w3 = philox_words(quads, draw[0], draw[1], draw[2], draw[3], draw[4])
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLS))
        uniform = (words >> 8).to(tl.float32)
    elif RANDOM == "elements":
        elements = first + (rows + tl.arange(0, COLS)[None, :])
        uniform = (philox_word(elements, draw[0], draw[1], draw[2], draw[3], draw[4]) >> 8).to(tl.float32)
    else:
        uniform = 0.0
    return uniform


@triton.jit
def rotated_where_whole(values, remaining, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The tile with its whole blocks rotated; a last short block is left alone."""
    is_whole = (tl.arange(0, ROWS) + 1) * BLOCK <= remaining
    return tl.where(is_whole[:, None], butterflies(values, ROWS, BLOCK), values)


@triton.jit
def decoded_tile(
    headers, codes, remaining, KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    ROWS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Values float32 [ROWS, COLS] of a tile's headers and bytes of codes, in [-LARGEST, LARGEST] or NaN."""
    values = decode_tile(headers, codes, KIND, BITS)
    if ROTATED:
        values = clamped(values, FLOAT32_MAX)
        is_whole = ((tl.arange(0, ROWS) + 1) * BLOCK <= remaining)[:, None]
        values = tl.where(is_whole, butterflies(values, ROWS, BLOCK) * (1.0 / BLOCK), values)
    return clamped(values, LARGEST)


@triton.jit
def load_message(
    message_ptr, segment, tile, remaining, shape, KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    ROTATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Values float32 [ROWS, COLS] of a tile of the message at ``message_ptr``; anything where there is none.

    Those of block codecs are in [-LARGEST, LARGEST] or NaN.
    ``shape``: elements of a segment, bytes of its codes, offset of the codes.
    """
    segment_numel, _, _ = shape
    if KIND == "cast":
        first = segment * segment_numel + tile * (BLOCK * ROWS)
        values = load_array(message_ptr, first, remaining, BLOCK, ROWS, COLS)
    else:
        headers, codes = _load_block(message_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROWS, COLS)
        values = decoded_tile(headers, codes, remaining, KIND, BITS, BLOCK, ROTATED, ROWS, LARGEST)
    return values


@triton.jit
def _load_block(
    message_ptr, segment, tile, remaining, shape, KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Headers int32 [ROWS] and bytes of codes of a tile of a message of a block codec."""
    segment_numel, segment_nbytes, codes_offset = shape
    headers = _load_headers(message_ptr, segment, tile, remaining, segment_numel, KIND, BLOCK, ROWS)
    codes_ptr = message_ptr + codes_offset + segment * segment_nbytes
    return headers, _load_codes(codes_ptr, tile, segment_nbytes, BITS, BLOCK, ROWS, COLS)


@triton.jit
def load_sum(
    messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROTATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum of the messages' values, the first plus the second, plus the third, ..."""
    CAPABILITY: tl.constexpr = 0 if INTERPRETED else capability()
    if CAPABILITY >= 80 and not ROTATED and (KIND == "symmetric" or KIND == "nf4" or KIND == "fp8"):
        total, largest = _fused_sum(
            messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROWS, COLS
        )
        if largest >= (FP8_CLAMPED_FROM if KIND == "fp8" else CLAMPED_FROM):
            total = _clamped_sum(
                messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS,
                COLS, 1,
            )  # fmt: skip
    else:
        total = _clamped_sum(
            messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS,
            COLS, 4,
        )  # fmt: skip
    return total


@triton.jit
def _clamped_sum(
    messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROTATED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """The sum, each term clamped to float32's finite range."""
    total = load_message(
        messages_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS, COLS, FLOAT32_MAX
    )
    for _ in tl.range(1, num_messages, loop_unroll_factor=UNROLLED):
        messages_ptr += pitch
        total += load_message(
            messages_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROTATED, ROWS, COLS, FLOAT32_MAX
        )
    return total


@triton.jit
def _fused_sum(
    messages_ptr, num_messages, pitch, segment, tile, remaining, shape, KIND: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum without clamps, and the bits of the largest scale: below CLAMPED_FROM no term needs one."""
    headers, codes = _load_block(messages_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROWS, COLS)
    total = decode_tile(headers, codes, KIND, BITS)
    largest = (headers & 0x7FFF) << 16
    for _ in tl.range(1, num_messages, loop_unroll_factor=4):
        messages_ptr += pitch
        headers, codes = _load_block(messages_ptr, segment, tile, remaining, shape, KIND, BITS, BLOCK, ROWS, COLS)
        total = added_tile(total, headers, codes, KIND, BITS)
        largest = tl.maximum(largest, (headers & 0x7FFF) << 16)
    return total, tl.max(largest, axis=0)


@triton.jit
def _header_pointers(
    message_ptr, segment, tile, remaining, segment_numel, KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.arange(0, ROWS)
    first = segment * tl.cdiv(segment_numel, BLOCK) + tile * ROWS
    if KIND == "asymmetric":
        pointers = message_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first + rows
    else:
        pointers = message_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + first + rows
    return pointers, rows * BLOCK < remaining


@triton.jit
def _load_headers(
    message_ptr, segment, tile, remaining, segment_numel, KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    pointers, mask = _header_pointers(message_ptr, segment, tile, remaining, segment_numel, KIND, BLOCK, ROWS)
    return tl.load(pointers, mask=mask, other=0).to(tl.int32)


@triton.jit
def _code_bytes(
    codes_ptr, tile, segment_nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """Pointers [ROWS, COLS * BITS / 8] to the bytes of a tile's codes, and which of them exist."""
    remaining = remaining_of(segment_nbytes, tile, BLOCK * ROWS * BITS // 8)  # keeps a multiple of 16 one
    offsets, mask = elements_of(remaining, BLOCK * BITS // 8, ROWS, COLS * BITS // 8)
    first = tile * (BLOCK * ROWS * BITS // 8)
    if BITS == 4 and not PAIRED:
        # A 0, of which the compiler only knows that it is a multiple of 4: a thread then has the codes of the eight
        # elements that it has of a 16-bit array, and they need not be exchanged between threads.
        first += (tile >> 40) * 4
    return codes_ptr + first + offsets, mask


@triton.jit
def _load_codes(
    codes_ptr, tile, segment_nbytes, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Codes as bytes, uint8 [ROWS, COLS * BITS / 8]; 0 where there is none."""
    pointers, mask = _code_bytes(codes_ptr, tile, segment_nbytes, BITS, BLOCK, ROWS, COLS, False)
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def store_message(
    message_ptr, segment, tile, remaining, shape, headers, codes, KIND: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Write a tile's headers and bytes of codes into the message at ``message_ptr``; ``shape`` as in load_message."""
    segment_numel, segment_nbytes, codes_offset = shape
    pointers, mask = _header_pointers(message_ptr, segment, tile, remaining, segment_numel, KIND, BLOCK, ROWS)
    tl.store(pointers, headers.to(pointers.dtype.element_ty), mask=mask)
    codes_ptr = message_ptr + codes_offset + segment * segment_nbytes
    pointers, mask = _code_bytes(codes_ptr, tile, segment_nbytes, BITS, BLOCK, ROWS, COLS, PAIRED)
    tl.store(pointers, codes, mask=mask)
    if BITS == 4 and not PAIRED:  # noqa: SIM102  the first is known when compiling
        # a segment's last byte, whose other half is unused: written again by the same threads
        if remaining % 2 == 1:
            offsets, _ = elements_of(remaining, BLOCK // 2, ROWS, COLS // 2)
            tl.store(pointers, codes & 0xF, mask=mask & (offsets * 2 + 1 == remaining))


@triton.jit
def store_ends(message_ptr, nbytes, num_segments, shape, layout_hash, HEADER_NBYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Write what lies around headers and codes: zeros, and the trailer."""
    segment_numel, segment_nbytes, codes_offset = shape
    offsets = tl.arange(0, 16)
    zeros = tl.zeros((16,), tl.uint8)
    num_headers = tl.full((), num_segments, tl.int64) * tl.cdiv(segment_numel, BLOCK)
    place = num_headers * HEADER_NBYTES + offsets
    tl.store(message_ptr + place, zeros, mask=place < codes_offset)
    place = codes_offset + tl.full((), num_segments, tl.int64) * segment_nbytes + offsets
    tl.store(message_ptr + place, zeros, mask=place < nbytes - 8)
    trailer = (message_ptr + (nbytes - 8)).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(trailer, layout_hash)
    tl.store(trailer + 1, 0)


@triton.jit
def clear_trailers(expected_ptr, num_expected, own_start, own_stop, nbytes):
    """Clear the trailers of messages that are yet to come, but for those from ``own_start`` to ``own_stop``."""
    if tl.program_id(0) == 0:
        for start in tl.range(0, num_expected, 128):
            index = start + tl.arange(0, 128)
            is_cleared = (index < num_expected) & ((index < own_start) | (index >= own_stop))
            trailers = expected_ptr + index.to(tl.int64) * nbytes + (nbytes - 8)
            tl.store(trailers.to(tl.pointer_type(tl.int64), bitcast=True), 0, mask=is_cleared)


@triton.jit
def check_hashes(messages_ptr, num_messages, pitch, layout_hash, is_valid_ptr, KIND: tl.constexpr):
    """Clear the flag at ``is_valid_ptr`` if a message of a block codec is not of the layout with this hash.

    Returns 0 if all of them are.
    """
    difference = tl.full((), 0, tl.int32)
    if KIND != "cast":
        for _ in tl.range(num_messages):
            found = tl.load((messages_ptr + (pitch - 8)).to(tl.pointer_type(tl.int32), bitcast=True))
            tl.store(is_valid_ptr, 0, mask=found != layout_hash)
            difference |= found ^ layout_hash
            messages_ptr += pitch
    return difference
