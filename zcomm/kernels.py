"""One dispatch table: operation -> the native kernel (CPU tensors) or the PyTorch reference (everything else).

The choice depends on formats, dtypes and device alone, never on sizes or values, and both have the same bits. float64
has no native kernels; neither have CUDA tensors yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

from zcomm import env, message, quant
from zcomm.errors import BackendUnavailableError, MessageError
from zcomm.message import MessageLayout
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
    "decode_sum",
    "decode_sum_requantize",
    "native_description",
    "native_unavailable_reason",
    "quantize",
]

P = ParamSpec("P")
NATIVE_CODECS = frozenset({"f32", "bf16", "fp16", "int8", "int4"})
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def native_unavailable_reason() -> str:
    """Why the native kernels cannot be used here; empty if they can."""
    if env.value("ZCOMM_KERNELS") == "reference":
        return "ZCOMM_KERNELS=reference"
    return _REASON


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
        and all(layout.codec.name in NATIVE_CODECS and not layout.is_rotated for layout in layouts)
        and _native_is_chosen()
    )


def _call(name: str, layout: MessageLayout, *arguments: Any) -> None:
    codec = layout.codec
    try:
        getattr(_native, name)(codec.number, layout.block or 2, *arguments, torch.get_num_threads())
    except ValueError as error:
        raise MessageError(f"{layout.operation}, {codec.name}, {layout.numel} elements: {error}") from error


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
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None = None
) -> None:
    """Write messages ``out`` [num_messages, nbytes] from the array that begins at ``x``; see :mod:`zcomm.quant`."""
    if out.numel() and draw is None and _uses_native(x, layout):
        _call(
            "quantize", layout, out.shape[0], layout.num_segments, layout.segment_numel, DTYPE_NUMBERS[x.dtype],
            x.data_ptr(), message_stride, segment_stride, out.data_ptr(), layout.nbytes, layout.hash,
        )  # fmt: skip
    else:
        quant.quantize(x, layout, out, message_stride, segment_stride, draw)
    message.sign(out, layout)


@_shown
def decode(messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int) -> None:
    """Write the values of ``messages`` into the array that begins at ``out``."""
    message.verify(messages, layout)
    if messages.numel() and _uses_native(out, layout):
        _call(
            "decode", layout, messages.shape[0], layout.num_segments, layout.segment_numel, messages.data_ptr(),
            layout.nbytes, layout.hash, DTYPE_NUMBERS[out.dtype], out.data_ptr(), message_stride, segment_stride,
        )  # fmt: skip
    else:
        quant.decode(messages, layout, out, message_stride, segment_stride)


@_shown
def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """Write the sum of ``messages`` over ``divisor`` into ``out``."""
    message.verify(messages, layout)
    if messages.numel() and _uses_native(out, layout):
        _call(
            "decode_sum", layout, messages.shape[0], layout.num_segments, layout.segment_numel, messages.data_ptr(),
            layout.nbytes, layout.hash, DTYPE_NUMBERS[out.dtype], out.data_ptr(), segment_stride, divisor,
        )  # fmt: skip
    else:
        quant.decode_sum(messages, layout, out, segment_stride, divisor)


@_shown
def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None = None
) -> None:
    """Sum ``messages``; segment s of the sum becomes message s of ``out``."""
    message.verify(messages, layout)
    if messages.numel() and draw is None and _uses_native(out, layout, out_layout):
        _call(
            "decode_sum_requantize", layout, messages.shape[0], layout.num_segments, layout.segment_numel,
            messages.data_ptr(), layout.nbytes, layout.hash, out_layout.codec.number, out_layout.block or 2,
            out.data_ptr(), out_layout.nbytes, out_layout.hash,
        )  # fmt: skip
    else:
        quant.decode_sum_requantize(messages, layout, out, out_layout, draw)
    message.sign(out, out_layout)
