"""Launchers of the Triton kernels: each takes preallocated arrays and launches one kernel.

``layout`` is a :class:`zcomm._formats.message.MessageLayout`, ``draw`` a :class:`zcomm._formats.philox.Draw`; only
their attributes are used. Arrays are float32, bfloat16 or float16 and are addressed as in
:mod:`zcomm._formats.reference`: message i, segment s starts at element ``i * message_stride + s * segment_stride``.
Messages are uint8 [num_messages, nbytes], contiguous and, for block codecs, at a multiple of 16 bytes.

``expected`` is the receive buffer of the exchange that follows, uint8 [m, nbytes], of the layout that is written: a
kernel that encodes clears its trailers, except those of ``out`` if that lies in it. Otherwise a message that arrives
too short could be taken for the one that was in that memory before.
``is_valid`` is int32 [1] on the messages' device: a kernel that decodes clears it if a trailer has another hash.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from ._layout import DrawLike, Layout, encoding_of, random_of, typed
from ._run import columns, run

__all__ = ["ResidualArguments", "decode", "decode_sum", "decode_sum_requantize", "quantize"]

RESIDUAL_BLOCK = 256
OF_RESIDUAL = ("residual_codes_ptr", "residual_scales_ptr")


class ResidualArguments(NamedTuple):
    """A residual (N10): added before encoding, then replaced by what encoding loses.

    Row i * num_segments + s belongs to segment s of message i; all rows of one array have the same stride.
    """

    codes: Tensor
    """int8 [num_rows, num_blocks, 256], read and overwritten; zeros mean no residual."""
    scales: Tensor
    """bfloat16 [num_rows, num_blocks], read and overwritten."""
    beta: float


class Summed(NamedTuple):
    """An array that :func:`decode_sum` writes and :func:`quantize` reads, and whether a message was refused."""

    values: Tensor
    refused: Tensor
    """int32 [1], not 0 if a message had another layout: the message encoded from the sum must be refused, too.

    Unlike the device's flag it belongs to this sum alone.
    """


def quantize(
    x: Tensor | Summed, layout: Layout, out: Tensor, message_stride: int, segment_stride: int,
    draw: DrawLike | None = None, *, held: Tensor | None = None, residual: ResidualArguments | None = None,
    expected: Tensor | None = None,
) -> None:  # fmt: skip
    """Encode the array ``x``, or RN(x - held) with ``held`` addressed as ``x``, as messages ``out``.

    ``residual`` needs a block codec whose block is a power of two.
    """
    x, refused = x if isinstance(x, Summed) else (x, None)
    if layout.codec.dtype is not None:
        strides = (layout.num_segments * layout.segment_numel, layout.segment_numel)
        if residual is not None:
            raise ValueError(f"a residual needs a block codec: codec={layout.codec.name}")
        _cast(x, (message_stride, segment_stride), typed(out, layout), strides, layout, out.shape[0], held=held)
        return
    encoding = encoding_of(layout)
    strides = (message_stride, segment_stride)
    words, random = random_of(draw, layout, strides)
    run(
        kernels.quantize_kernel,
        (x, held, refused, typed(out, layout), message_stride, segment_stride, *encoding.shape,
         *_residual_arguments(residual, layout), *words, *_expected_arguments(expected, out, layout)),
        _encoder(layout, random, residual)
        | {"DELTA": held is not None, "PAIRED": not random and _is_paired(x, layout, strides, held, residual)},
        num_units=out.shape[0] * layout.num_segments,
        numel=layout.segment_numel,
        block=encoding.block,
        written=() if residual is None else OF_RESIDUAL,
        widest=0 if residual is None else RESIDUAL_BLOCK,
    )  # fmt: skip


def _is_paired(
    x: Tensor, layout: Layout, strides: tuple[int, int], held: Tensor | None, residual: ResidualArguments | None
) -> bool:
    """Whether two elements can be loaded as one word, and their two codes stored as one byte, which is faster."""
    is_plain = held is None and residual is None and not layout.is_rotated and encoding_of(layout).kind != "asymmetric"
    return (
        is_plain and layout.codec.bits == 4 and x.element_size() == 2 and x.data_ptr() % 4 == 0
        and not any(number % 2 for number in (layout.segment_numel, layout.block, *strides))
    )  # fmt: skip


def decode(
    messages: Tensor, layout: Layout, out: Tensor, message_stride: int, segment_stride: int,
    *, is_valid: Tensor, added: bool = False,
) -> None:  # fmt: skip
    """Decode ``messages`` into the array ``out``; with ``added`` write RN(out + value)."""
    if layout.codec.dtype is not None and not added:
        strides = (layout.num_segments * layout.segment_numel, layout.segment_numel)
        _cast(typed(messages, layout), strides, out, (message_stride, segment_stride), layout, messages.shape[0])
        return
    encoding = encoding_of(layout)
    run(
        kernels.decode_kernel,
        (typed(messages, layout), out, is_valid, message_stride, segment_stride, *encoding.shape),
        _decoder(layout) | {"ADDED": added, "LARGEST": _largest(torch.float32 if added else out.dtype)},
        num_units=messages.shape[0] * layout.num_segments,
        numel=layout.segment_numel,
        block=encoding.block,
        written=("out_ptr",) if added else (),
    )


def _division(divisor: float) -> tuple[str, float]:
    """The kernel's DIVIDED, and its factor: what it divides or multiplies by.

    The inverse of a power of two is exact, so the product with it has the bits of the quotient.
    """
    if divisor == 1:
        return "", 1.0
    is_power = 2.0**-100 <= divisor <= 2.0**100 and math.frexp(divisor)[0] == 0.5
    return ("by product", 1 / divisor) if is_power else ("by division", float(divisor))


def decode_sum(
    messages: Tensor, layout: Layout, out: Tensor | Summed, segment_stride: int, divisor: float, *, is_valid: Tensor
) -> None:
    """Write the sum of ``messages``, divided by ``divisor``, into ``out``: segment s at ``s * segment_stride``."""
    out, refused = out if isinstance(out, Summed) else (out, None)
    encoding = encoding_of(layout)
    how, factor = _division(divisor)
    run(
        kernels.decode_sum_kernel,
        (typed(messages, layout), out, is_valid, refused, segment_stride, messages.shape[0], factor,
         *encoding.shape),
        _decoder(layout) | {"DIVIDED": how},
        num_units=layout.num_segments,
        numel=layout.segment_numel,
        block=encoding.block,
    )  # fmt: skip


def decode_sum_requantize(
    messages: Tensor, layout: Layout, out: Tensor, out_layout: Layout, draw: DrawLike | None = None,
    *, is_valid: Tensor, residual: ResidualArguments | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """Sum ``messages`` and encode segment s of the sum as message s of ``out``, which has one segment per message.

    One launch if the blocks are equal or powers of two; else two, with a float32 array between them. If a message is
    refused, written messages of a block codec get hash 0, so that their receivers refuse them, too.
    """
    if out_layout.codec.dtype is not None:
        if residual is not None:
            raise ValueError(f"a residual needs a block codec: codec={out_layout.codec.name}")
        decode_sum(messages, layout, typed(out, out_layout), layout.segment_numel, 1, is_valid=is_valid)
        return
    if not _is_fused(layout, out_layout):
        numel = layout.num_segments * layout.segment_numel
        room = torch.empty(numel + 1, dtype=torch.float32, device=out.device)
        total = Summed(room[:numel], room[numel:].view(torch.int32))
        decode_sum(messages, layout, total, layout.segment_numel, 1, is_valid=is_valid)
        quantize(total, out_layout, out, layout.segment_numel, 0, draw, residual=residual, expected=expected)
        return
    encoding, out_encoding = encoding_of(layout), encoding_of(out_layout)
    decoder = _decoder(layout)
    if layout.codec.dtype is not None:  # it has no blocks: use those of the output
        decoder |= {"BLOCK": out_encoding.block, "COLS": columns(out_encoding.block)}
    words, random = random_of(draw, out_layout, (layout.segment_numel, 0))
    run(
        kernels.requantize_kernel,
        (typed(messages, layout), is_valid, typed(out, out_layout), messages.shape[0], *encoding.shape,
         *out_encoding.shape[2:], *_residual_arguments(residual, out_layout), *words,
         *_expected_arguments(expected, out, out_layout)),
        {f"IN_{name}": value for name, value in decoder.items()} | _encoder(out_layout, random, residual),
        num_units=layout.num_segments,
        numel=layout.segment_numel,
        block=out_encoding.block,
        written=() if residual is None else OF_RESIDUAL,
        widest=max(columns(decoder["BLOCK"]), 0 if residual is None else RESIDUAL_BLOCK),
    )  # fmt: skip


def _is_fused(layout: Layout, out_layout: Layout) -> bool:
    blocks = (layout.block or out_layout.block, out_layout.block)
    return blocks[0] == blocks[1] or not any(block & (block - 1) for block in blocks)


def _decoder(layout: Layout) -> dict[str, Any]:
    """The constants of a kernel that decodes."""
    encoding = encoding_of(layout)
    return {
        "KIND": encoding.kind,
        "BITS": layout.codec.bits,
        "BLOCK": encoding.block,
        "COLS": columns(encoding.block),
        "ROTATED": layout.is_rotated,
    }


@cache
def _largest(dtype: torch.dtype) -> float:
    """The largest finite value of ``dtype`` that is a float32."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _encoder(layout: Layout, random: str, residual: ResidualArguments | None) -> dict[str, Any]:
    """The constants of a kernel that encodes."""
    return _decoder(layout) | {
        "QMAX": encoding_of(layout).qmax,
        "HEADER_NBYTES": layout.codec.header_nbytes,
        "RANDOM": random,
        "RESIDUAL": residual is not None,
    }


def _residual_arguments(
    residual: ResidualArguments | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None, int, int, float]:
    """Codes, scales, their row strides, beta."""
    if residual is None:
        return None, None, 0, 0, 0.0
    if layout.block & (layout.block - 1):
        raise ValueError(f"with a residual, the block must be a power of two: block={layout.block}")
    codes, scales, beta = residual
    return codes, scales.view(torch.int16), codes.stride(0), scales.stride(0), beta


def _expected_arguments(expected: Tensor | None, out: Tensor, layout: Layout) -> tuple[Tensor, int, int, int]:
    """The receive buffer, its number of messages, and which of them lie in ``out``: first, last + 1."""
    if expected is None:
        return typed(out, layout), 0, 0, 0
    own = (out.data_ptr() - expected.data_ptr()) // layout.nbytes
    return typed(expected, layout), expected.shape[0], own, own + out.shape[0]


def _cast(
    source: Tensor, source_strides: tuple[int, int], target: Tensor, target_strides: tuple[int, int], layout: Layout,
    num_messages: int, *, held: Tensor | None = None,
) -> None:  # fmt: skip
    run(
        kernels.cast_kernel,
        (source, held, target, *source_strides, *target_strides, layout.num_segments, layout.segment_numel),
        {"DELTA": held is not None},
        num_units=num_messages * layout.num_segments,
        numel=layout.segment_numel,
        block=1,
    )
