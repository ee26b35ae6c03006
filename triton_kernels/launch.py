"""Launchers of the kernels: preallocated arrays in, one kernel launch, nothing else on the host.

``layout`` is a :class:`zcomm.message.MessageLayout`, ``draw`` a :class:`zcomm.philox.Draw` (both by their attributes).
Arrays are float32, bfloat16 or float16 and are addressed as in :mod:`zcomm.quant`: message i, segment s begins at
``i * message_stride + s * segment_stride`` elements. Messages are uint8 [num_messages, nbytes], contiguous and, for
block codecs, at an address that is a multiple of 16.

``is_valid`` is int32 [1] on the messages' device: a kernel that decodes clears it if a trailer is not this layout's.
"""

from __future__ import annotations

from torch import Tensor

from . import kernels
from ._layout import Draw, Layout, encoding_of, random_of, typed
from ._run import columns, run

__all__ = ["decode", "quantize"]


def quantize(
    x: Tensor, layout: Layout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None = None,
    *, held: Tensor | None = None,
) -> None:  # fmt: skip
    """Write messages ``out`` from the array ``x``, or from RN(x - held), ``held`` being addressed as ``x`` is."""
    if layout.codec.dtype is not None:
        strides = (layout.num_segments * layout.segment_numel, layout.segment_numel)
        _cast(x, (message_stride, segment_stride), typed(out, layout), strides, layout, out.shape[0])
        return
    encoding = encoding_of(layout)
    words, random = random_of(draw, layout, (message_stride, segment_stride))
    run(
        kernels.quantize_kernel,
        (x, held, typed(out, layout), message_stride, segment_stride, *encoding.shape, *words),
        _encoder(layout) | {"RANDOM": random, "DELTA": held is not None},
        num_units=out.shape[0] * layout.num_segments,
        numel=layout.segment_numel,
        block=encoding.block,
    )


def decode(
    messages: Tensor, layout: Layout, out: Tensor, message_stride: int, segment_stride: int, is_valid: Tensor,
    *, added: bool = False,
) -> None:  # fmt: skip
    """Write the values of ``messages`` into the array ``out``, or with ``added`` RN(out + value)."""
    if layout.codec.dtype is not None and not added:
        strides = (layout.num_segments * layout.segment_numel, layout.segment_numel)
        _cast(typed(messages, layout), strides, out, (message_stride, segment_stride), layout, messages.shape[0])
        return
    encoding = encoding_of(layout)
    run(
        kernels.decode_kernel,
        (typed(messages, layout), out, is_valid, message_stride, segment_stride, *encoding.shape),
        _decoder(layout) | {"ADDED": added},
        num_units=messages.shape[0] * layout.num_segments,
        numel=layout.segment_numel,
        block=encoding.block,
        written=("out_ptr",) if added else (),
    )


def _decoder(layout: Layout) -> dict[str, object]:
    """The constants of a kernel that decodes."""
    encoding = encoding_of(layout)
    return {
        "KIND": encoding.kind,
        "BITS": layout.codec.bits,
        "BLOCK": encoding.block,
        "COLS": columns(encoding.block),
        "ROTATED": layout.is_rotated,
    }


def _encoder(layout: Layout) -> dict[str, object]:
    """The constants of a kernel that encodes."""
    return _decoder(layout) | {"QMAX": encoding_of(layout).qmax, "HEADER_NBYTES": layout.codec.header_nbytes}


def _cast(
    source: Tensor, source_strides: tuple[int, int], target: Tensor, target_strides: tuple[int, int], layout: Layout,
    num_messages: int,
) -> None:  # fmt: skip
    run(
        kernels.cast_kernel,
        (source, target, *source_strides, *target_strides, layout.num_segments, layout.segment_numel),
        {},
        num_units=num_messages * layout.num_segments,
        numel=layout.segment_numel,
        block=1,
    )
