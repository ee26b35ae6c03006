"""One dispatch table: operation -> Triton (CUDA tensors), the native kernel (CPU tensors) or the PyTorch reference.

The choice depends on formats, dtypes and device alone, never on sizes or values, and all have the same bits. float64
has the reference only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from zcomm import env, message, on_triton, quant
from zcomm.errors import BackendUnavailableError, MessageError
from zcomm.message import MessageLayout
from zcomm.on_triton import ResidualBlocks, fuses_residual
from zcomm.philox import Draw
from zcomm.profiling import is_profiling, span

try:
    from zcomm import _native
except ImportError as error:  # a source tree that was not built
    _native = None  # type: ignore[assignment]
    _REASON = f"the native module is not built: {error}; install the package with `pip install .`"
else:
    _REASON = ""

__all__ = [
    "decode",
    "decode_add",
    "decode_sum",
    "decode_sum_requantize",
    "file_queue",
    "fuses_residual",
    "native",
    "native_description",
    "native_unavailable_reason",
    "quantize",
    "quantize_difference",
]

P = ParamSpec("P")
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def native_unavailable_reason() -> str:
    """Why the native kernels cannot be used here; empty if they can."""
    if env.value("ZCOMM_KERNELS") == "reference":
        return "ZCOMM_KERNELS=reference"
    return _REASON


def native() -> Any:
    """The native module, for operations that have no other kernel.

    Raises:
        BackendUnavailableError: It is not built, or ``ZCOMM_KERNELS=reference``.
    """
    if reason := native_unavailable_reason():
        raise BackendUnavailableError(f"this operation has a native kernel only, and {reason}")
    return _native


def file_queue(num_requests: int, request_nbytes: int) -> Any:
    """A native ``FileQueue``, which reads and writes files asynchronously, with the engine of ``ZCOMM_FILES``.

    Raises:
        BackendUnavailableError: The native module, or the engine, cannot be used here.
        ValueError: ``num_requests`` is not 1 to 256, or ``request_nbytes`` no multiple of 4096.
    """
    wanted = env.value("ZCOMM_FILES")
    queue = native().FileQueue(num_requests, request_nbytes, may_use_ring=wanted != "threads")
    if wanted not in ("auto", queue.engine):
        raise BackendUnavailableError(f"ZCOMM_FILES={wanted}, but built without liburing, or refused by the kernel")
    return queue


def native_description() -> str:
    """Instruction set and compiler of the native kernels, which must be available."""
    built = _native.build_info()
    cuda = "with CUDA" if built["cuda"] else "without CUDA"
    return f"{_native.isa()} of {', '.join(built['isa_levels'])}; {built['compiler']}; {cuda}"


@cache
def _native_is_chosen() -> bool:
    reason = native_unavailable_reason()
    if reason and env.value("ZCOMM_KERNELS") == "native":
        raise BackendUnavailableError(f"ZCOMM_KERNELS=native, but {reason}")
    if _REASON and env.value("ZCOMM_KERNELS") == "auto":
        warnings.warn(f"zcomm uses its slow PyTorch reference kernels: {reason}", RuntimeWarning, stacklevel=4)
    return not reason


def _uses_native(array: Tensor, *layouts: MessageLayout) -> bool:
    return (
        array.device.type == "cpu"
        and (array.dtype in DTYPE_NUMBERS or array.dtype == torch.uint8)
        and all(layout.codec.dtype != torch.float64 for layout in layouts)
        and _native_is_chosen()
    )


def _call(name: str, layout: MessageLayout, *arguments: Any) -> None:
    try:
        getattr(_native, name)(*_wire(layout), *arguments, torch.get_num_threads())
    except ValueError as error:
        raise MessageError(f"{layout.operation}, {layout.codec.name}, {layout.numel} elements: {error}") from error


def _wire(layout: MessageLayout) -> tuple[int, int, bool]:
    return layout.codec.number, layout.block, layout.is_rotated


def _rows(layout: MessageLayout, num_messages: int) -> tuple[int, int, int]:
    return num_messages, layout.num_segments, layout.segment_numel


def _incoming(messages: Tensor, layout: MessageLayout) -> tuple[int, ...]:
    return *_rows(layout, messages.shape[0]), messages.data_ptr(), layout.nbytes, layout.hash


def _array(array: Tensor) -> tuple[int, int]:
    return DTYPE_NUMBERS[array.dtype], array.data_ptr()


def _draw(draw: Draw | None) -> tuple[int, ...] | None:
    if draw is None:
        return None
    words = (draw.seed, draw.tensor, draw.step, draw.hop, draw.rank)
    return *(word & 0xFFFFFFFF for word in words), draw.first


def _shown(kernel: Callable[P, None]) -> Callable[P, None]:
    """``kernel``, as a span of a profiler's trace with the names of its codecs."""

    @wraps(kernel)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        if not is_profiling():
            return kernel(*args, **kwargs)
        with span(kernel.__name__, *(a.codec.name for a in args if isinstance(a, MessageLayout))):
            return kernel(*args, **kwargs)

    return shown


@_shown
def quantize(
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None = None,
    *, residual: ResidualBlocks | None = None,
) -> None:  # fmt: skip
    """Write messages ``out`` [num_messages, nbytes] from the array that begins at ``x``; see :mod:`zcomm.quant`.

    ``residual``, of a row for each message, is added and renewed: only where :func:`fuses_residual` says so.
    """
    assert residual is None or fuses_residual(x, layout), f"a residual with {layout}"
    if out.numel() and on_triton.serves(x, layout):
        on_triton.quantize(x, layout, out, message_stride, segment_stride, draw, residual=residual)
    elif out.numel() and _uses_native(x, layout):
        target = out.data_ptr(), layout.nbytes, layout.hash, _draw(draw)
        _call("quantize", layout, *_rows(layout, out.shape[0]), *_array(x), message_stride, segment_stride, *target)
    else:
        quant.quantize(x, layout, out, message_stride, segment_stride, draw)
    message.sign(out, layout)


@_shown
def decode(messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int) -> None:
    """Write the values of ``messages`` into the array that begins at ``out``."""
    message.verify(messages, layout)
    if messages.numel() and on_triton.serves(out, layout):
        on_triton.decode(messages, layout, out, message_stride, segment_stride)
    elif messages.numel() and _uses_native(out, layout):
        _call("decode", layout, *_incoming(messages, layout), *_array(out), message_stride, segment_stride)
    else:
        quant.decode(messages, layout, out, message_stride, segment_stride)


@_shown
def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """Write the sum of ``messages`` over ``divisor`` into ``out``."""
    message.verify(messages, layout)
    if messages.numel() and on_triton.serves(out, layout):
        on_triton.decode_sum(messages, layout, out, segment_stride, divisor)
    elif messages.numel() and _uses_native(out, layout):
        _call("decode_sum", layout, *_incoming(messages, layout), *_array(out), segment_stride, divisor)
    else:
        quant.decode_sum(messages, layout, out, segment_stride, divisor)


@_shown
def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None = None,
    *, residual: ResidualBlocks | None = None,
) -> None:  # fmt: skip
    """Sum ``messages``; segment s of the sum becomes message s of ``out``. ``residual`` as in :func:`quantize`."""
    assert residual is None or fuses_residual(out, out_layout, layout), f"a residual with {out_layout}"
    message.verify(messages, layout)
    if messages.numel() and on_triton.serves(out, layout, out_layout):
        on_triton.decode_sum_requantize(messages, layout, out, out_layout, draw, residual=residual)
    elif messages.numel() and _uses_native(out, layout, out_layout):
        target = out.data_ptr(), out_layout.nbytes, out_layout.hash, _draw(draw)
        _call("decode_sum_requantize", layout, *_incoming(messages, layout), *_wire(out_layout), *target)
    else:
        quant.decode_sum_requantize(messages, layout, out, out_layout, draw)
    message.sign(out, out_layout)


@_shown
def quantize_difference(x: Tensor, held: Tensor, layout: MessageLayout, out: Tensor, draw: Draw | None = None) -> None:
    """Write message ``out`` [1, nbytes] from RN(x - held), both [n] (N11)."""
    if x.numel() and on_triton.serves(x, layout) and on_triton.serves(held, layout):
        on_triton.quantize(x, layout, out, 0, 0, draw, held=held)
        message.sign(out, layout)
    else:
        wide = torch.float64 if torch.float64 in (x.dtype, held.dtype) else torch.float32
        quantize((x.to(wide) - held).float(), layout, out, 0, 0, draw)


@_shown
def decode_add(messages: Tensor, layout: MessageLayout, out: Tensor) -> None:
    """Add the values of message ``messages`` [1, nbytes] to ``out`` [n] (N11)."""
    if out.numel() and on_triton.serves(out, layout):
        message.verify(messages, layout)
        on_triton.decode(messages, layout, out, 0, 0, added=True)
    else:
        decoded = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        decode(messages, layout, decoded, 0, 0)
        out.add_(decoded)
