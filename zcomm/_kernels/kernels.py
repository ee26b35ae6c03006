"""Kernel dispatch: each operation runs on Triton or CUDA (CUDA tensors), native (CPU tensors) or the reference.

The choice depends only on formats, dtypes, device and ``MessageLayout.kernels`` (a Topology's ``kernels=``, or with
"auto" ZCOMM_KERNELS), never on sizes or values. All kernels give the same bits. The reference alone has every codec,
float64 among them (:mod:`zcomm._kernels.codec_support`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._formats import message, reference
from zcomm._formats.message import MessageLayout
from zcomm._formats.philox import Draw
from zcomm._kernels import native_calls as calls
from zcomm._kernels import on_cuda, on_triton
from zcomm._kernels.codec_support import have_codecs
from zcomm._kernels.native_calls import unavailable_reason as native_unavailable_reason
from zcomm._kernels.on_triton import ResidualBlocks
from zcomm._kernels.profiling import is_profiling, span
from zcomm.errors import BackendUnavailableError

P = ParamSpec("P")
DECODE_CHUNK_NUMEL = 2**22
"""Elements that :func:`decode_add` decodes at a time where no kernel adds: bounds its scratch memory."""


def native() -> Any:
    """The native module, for operations that have no other kernel.

    Raises:
        BackendUnavailableError: It is not built, or ``ZCOMM_KERNELS=reference``.
    """
    if reason := native_unavailable_reason():
        raise BackendUnavailableError(f"this operation has only a native kernel, and {reason}")
    return calls.module


def file_queue(num_requests: int, request_nbytes: int) -> Any:
    """A native ``FileQueue``, which reads and writes files asynchronously with the engine that ``ZCOMM_FILES`` names.

    Raises:
        BackendUnavailableError: The native module, or the engine, cannot be used here.
        ValueError: ``num_requests`` is not 1 to 256, or ``request_nbytes`` is not a multiple of 4096.
    """
    wanted = env.value("ZCOMM_FILES")
    queue = native().FileQueue(num_requests, request_nbytes, may_use_ring=wanted != "threads")
    if wanted not in ("auto", queue.engine):
        raise BackendUnavailableError(f"ZCOMM_FILES={wanted}, but built without liburing, or forbidden by the kernel")
    return queue


def native_description() -> str:
    """Instruction set and compiler of the native kernels. They must be available."""
    built = calls.module.build_info()
    cuda = f"with CUDA {built['cuda']}" if built["cuda"] else "without CUDA"
    return f"{calls.module.isa()} of {', '.join(built['isa_levels'])}; {built['compiler']}; {cuda}"


def unavailable_reason() -> str:
    """Why this process cannot use the kernels that ``ZCOMM_KERNELS`` names, whatever the formats; empty if it can.

    A native module that is not built counts only if it was requested; one built for another machine always counts.
    """
    if reason := _native_error():
        return reason
    if env.value("ZCOMM_KERNELS") == "cuda" and torch.cuda.is_available() and (reason := on_cuda.unavailable_reason()):
        return f"ZCOMM_KERNELS=cuda, but {reason}"
    return ""


def _native_error(chosen: str = "auto") -> str:
    (setting, chosen_by), reason = env.kernels(chosen), native_unavailable_reason(chosen)
    if not reason or setting == "reference":
        return ""
    if setting == "native":
        return f"{chosen_by}, but {reason}"
    return f"{reason}; or set ZCOMM_KERNELS=reference, which is slow" if calls.IS_INCOMPATIBLE else ""


@cache
def _native_is_chosen(chosen: str) -> bool:
    if refused := _native_error(chosen):
        raise BackendUnavailableError(refused)
    reason = native_unavailable_reason(chosen)
    if calls.UNBUILT_REASON and env.kernels(chosen)[0] == "auto":
        warnings.warn(f"zcomm uses its slow PyTorch reference kernels: {reason}", RuntimeWarning, stacklevel=4)
    return not reason


def _uses_native(array: Tensor, *layouts: MessageLayout) -> bool:
    return (
        array.device.type == "cpu"
        and (array.dtype in calls.DTYPE_NUMBERS or array.dtype == torch.uint8)
        and have_codecs(calls.CODECS, layouts, "native")
        and _native_is_chosen(layouts[0].kernels)
    )


def _call(name: str, layout: MessageLayout, *arguments: Any) -> None:
    calls.call(name, layout, *arguments, torch.get_num_threads())


def _gpu_kernels(array: Tensor, *layouts: MessageLayout, draw: Draw | None = None) -> ModuleType | None:
    """The module of the GPU kernels that encode or decode ``array``; None: a CPU kernel or the reference does."""
    if array.device.type == "cpu" and env.kernels(layouts[0].kernels)[0] != "triton":  # its interpreter runs on the CPU
        return None
    if on_cuda.serves(array, *layouts, draw=draw):
        return on_cuda
    return on_triton if on_triton.serves(array, *layouts) else None


def fuses_residual(array: Tensor, layout: MessageLayout, *others: MessageLayout, draw: Draw | None = None) -> bool:
    """Whether one kernel encodes ``array`` as ``layout``, after decoding ``others``, and updates its residual."""
    if not layout.codec.is_block:
        return False
    if on_cuda.serves(array, layout, *others, draw=draw) or on_triton.fuses_residual(array, layout, *others):
        return True
    return _uses_native(array, layout, *others) and calls.can_fuse_residual(layout)


def _draw(draw: Draw | None) -> tuple[int, ...] | None:
    if draw is None:
        return None
    words = (draw.seed, draw.tensor, draw.step, draw.hop, draw.rank)
    return *(word & 0xFFFFFFFF for word in words), draw.first


def _traced(kernel: Callable[P, None]) -> Callable[P, None]:
    """Show ``kernel`` in a profiler's trace as a span with the names of its codecs."""

    @wraps(kernel)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        if not is_profiling():
            return kernel(*args, **kwargs)
        with span(kernel.__name__, *(a.codec.name for a in args if isinstance(a, MessageLayout))):
            return kernel(*args, **kwargs)

    return shown


def _left_to_clear(expected: Tensor | None, layout: MessageLayout, gpu: ModuleType | None) -> Tensor | None:
    """The receive buffer whose trailers the kernel of ``gpu`` must clear; without such a kernel, clear them here."""
    if expected is None or not layout.codec.is_block:
        return None
    if gpu is None:
        message.clear_trailers(expected)
        return None
    return expected


@_traced
def quantize(
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None = None,
    *, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """Encode the array that starts at ``x`` as messages ``out`` [num_messages, nbytes].

    Addressing and arithmetic: :mod:`zcomm._formats.reference`.

    Args:
        x: The array's first element is its first.
        layout: Of the messages.
        out: uint8, contiguous.
        message_stride: Elements of the array from message to message.
        segment_stride: Elements of the array from segment to segment.
        draw: Random numbers, for a format that rounds stochastically.
        residual: One row per message; added before encoding and updated. Only where :func:`fuses_residual` allows it.
        expected: The receive buffer [m, nbytes] of the exchange that follows, of the same layout. Its trailers are
            cleared (M4), on a GPU in the same launch, except those of ``out`` if that lies in it.
    """
    assert residual is None or fuses_residual(x, layout, draw=draw), f"a residual with {layout}"
    gpu = _gpu_kernels(x, layout, draw=draw) if out.numel() else None
    expected = _left_to_clear(expected, layout, gpu)
    if gpu is not None:
        gpu.quantize(x, layout, out, message_stride, segment_stride, draw, residual=residual, expected=expected)
    elif out.numel() and _uses_native(x, layout):
        source = *calls.rows(layout, out.shape[0]), *calls.array(x), message_stride, segment_stride
        target = out.data_ptr(), layout.nbytes, layout.hash, _draw(draw)
        fused = () if residual is None else (calls.residual(residual),)
        _call("quantize_with_residual" if fused else "quantize", layout, *source, *target, *fused)
    else:
        reference.quantize(x, layout, out, message_stride, segment_stride, draw)
    message.sign(out, layout)


@_traced
def decode(messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int) -> None:
    """Decode ``messages`` into the array that starts at ``out``."""
    message.verify(messages, layout)
    if messages.numel() and (gpu := _gpu_kernels(out, layout)):
        gpu.decode(messages, layout, out, message_stride, segment_stride)
    elif messages.numel() and _uses_native(out, layout):
        _call("decode", layout, *calls.incoming(messages, layout), *calls.array(out), message_stride, segment_stride)
    else:
        reference.decode(messages, layout, out, message_stride, segment_stride)


@_traced
def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """Write the sum of ``messages``, divided by ``divisor``, into ``out``."""
    message.verify(messages, layout)
    if messages.numel() and (gpu := _gpu_kernels(out, layout)):
        gpu.decode_sum(messages, layout, out, segment_stride, divisor)
    elif messages.numel() and _uses_native(out, layout):
        _call("decode_sum", layout, *calls.incoming(messages, layout), *calls.array(out), segment_stride, divisor)
    else:
        reference.decode_sum(messages, layout, out, segment_stride, divisor)


@_traced
def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None = None,
    *, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """Sum ``messages`` and encode segment s of the sum as message s of ``out``; options as in :func:`quantize`."""
    assert residual is None or fuses_residual(out, out_layout, layout, draw=draw), f"a residual with {out_layout}"
    message.verify(messages, layout)
    gpu = _gpu_kernels(out, layout, out_layout, draw=draw) if messages.numel() else None
    options = {"residual": residual, "expected": _left_to_clear(expected, out_layout, gpu)}
    if gpu is not None:
        gpu.decode_sum_requantize(messages, layout, out, out_layout, draw, **options)
    elif messages.numel() and _uses_native(out, layout, out_layout):
        source = *calls.incoming(messages, layout), *calls.wire(out_layout)
        target = out.data_ptr(), out_layout.nbytes, out_layout.hash, _draw(draw)
        fused = () if residual is None else (calls.residual(residual),)
        name = "decode_sum_requantize_with_residual" if fused else "decode_sum_requantize"
        _call(name, layout, *source, *target, *fused)
    else:
        reference.decode_sum_requantize(messages, layout, out, out_layout, draw)
    message.sign(out, out_layout)


@_traced
def quantize_difference(
    x: Tensor, held: Tensor, layout: MessageLayout, out: Tensor, draw: Draw | None = None,
    *, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """Encode RN(x - held), both [n], as message ``out`` [1, nbytes] (N11); ``expected`` as in :func:`quantize`."""
    gpu = _gpu_kernels(x, layout, draw=draw) if x.numel() else None
    if gpu is not None and not gpu.serves(held, layout):
        gpu = None
    expected = _left_to_clear(expected, layout, gpu)
    if gpu is not None:
        gpu.quantize(x, layout, out, 0, 0, draw, held=held, expected=expected)
        message.sign(out, layout)
    elif x.numel() and _uses_native(x, layout) and _uses_native(held, layout):
        arrays = *calls.array(x), *calls.array(held), 0, 0
        target = out.data_ptr(), layout.nbytes, layout.hash, _draw(draw)
        _call("quantize_difference", layout, *calls.rows(layout, 1), *arrays, *target)
        message.sign(out, layout)
    else:
        wide = torch.float64 if torch.float64 in (x.dtype, held.dtype) else torch.float32
        quantize(x.to(wide, copy=True).sub_(held).float(), layout, out, 0, 0, draw)


@_traced
def decode_add(messages: Tensor, layout: MessageLayout, out: Tensor) -> None:
    """Add the values of message i of ``messages`` [m, nbytes] to row i of ``out`` [m, n] (N11). Rows are contiguous."""
    gpu = _gpu_kernels(out, layout) if out.numel() else None
    if gpu is not None or (out.numel() and _uses_native(out, layout)):
        message.verify(messages, layout)
        if gpu is not None:
            gpu.decode(messages, layout, out, out.stride(0), 0, added=True)
        else:
            _call("decode_add", layout, *calls.incoming(messages, layout), *calls.array(out), out.stride(0), 0)
        return
    at_a_time = max(DECODE_CHUNK_NUMEL // max(out.shape[1], 1), 1)
    for some, rows in zip(torch.split(messages, at_a_time), torch.split(out, at_a_time), strict=True):
        decoded = torch.empty(rows.shape, dtype=torch.float32, device=out.device)
        decode(some, layout, decoded, decoded.stride(0), 0)
        if out.dtype.itemsize < decoded.dtype.itemsize:  # the bits of rows.add_(decoded), several times faster
            rows.copy_(decoded.add_(rows))
        else:
            rows.add_(decoded)
