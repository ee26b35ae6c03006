"""The CUDA kernels of the native module: which calls they serve, the calls, and the NVIDIA driver they need.

They serve CUDA tensors if ZCOMM_KERNELS or a Topology's ``kernels=`` is "cuda", or if Triton is not installed: cast
formats, and int8, int4, nf4 and fp8_e4m3 with blocks that are a power of two from 8 to 1024, without zero point and
rotation, rounded to nearest. Everything else is left to Triton, or without it to the reference.
For the contracts see ``cpp/include/zcomm/cuda_kernels.h``. Layouts are checked as in :mod:`zcomm._kernels.on_triton`.

The driver's version comes from libcuda, by dlopen: the module links no CUDA library, so it can be imported without a
driver. Code built with CUDA m.n runs on a driver of CUDA m.0 or later; on an older one every call fails.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._formats.message import MessageLayout
from zcomm._formats.philox import Draw
from zcomm._kernels import native_calls as calls
from zcomm._kernels import on_triton
from zcomm._kernels.on_triton import ResidualBlocks
from zcomm.errors import BackendUnavailableError

LIBRARY = "libcuda.so.1"
FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the first Linux driver that supports it."""


@cache
def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, such as (13, 0); None without a driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value <= 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_description() -> str:
    """The driver's CUDA version and release as text, or that there is no driver."""
    cuda = driver_cuda()
    if cuda is None:
        return f"none: there is no {LIBRARY}"
    return f"CUDA {cuda[0]}.{cuda[1]}{_release()}"


def _release() -> str:
    """The driver's own version, if the kernel module reports it."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.is_file() else []
    numbers = [word for word in words if word[:1].isdecimal() and "." in word]
    return f", release {numbers[0]}" if numbers else ""


def driver_unavailable_reason(built: str) -> str:
    """Why CUDA code built with version ``built`` ("13.0.88") cannot run here, with the remedy; empty if it can."""
    major = int(built.partition(".")[0]) if built else 0
    cuda = driver_cuda()
    if not built or (cuda is not None and cuda[0] >= major):
        return ""
    number = FIRST_DRIVERS.get(major)
    wanted = f"driver {number} or later" if number else f"a driver of CUDA {major}.0 or later"
    command = f" (Ubuntu: sudo apt install nvidia-driver-{number})" if number else ""
    if cuda is None:
        return f"there is no NVIDIA driver ({LIBRARY}): install {wanted}{command}"
    return (
        f"the NVIDIA driver is too old: {driver_description()}, and the CUDA kernels are built with CUDA "
        f"{'.'.join(built.split('.')[:2])}. Install {wanted}{command}, or compile them with CUDA {cuda[0]}: "
        "ZCOMM_CUDA=ON pip install . in a checkout; Triton's kernels run on this driver"
    )


CODECS = frozenset({"f32", "bf16", "fp16", "int8", "int4", "nf4", "fp8_e4m3"})
BLOCKS = frozenset(1 << exponent for exponent in range(3, 11))


def unavailable_reason(chosen: str = "auto") -> str:
    """Why the CUDA kernels are not used for CUDA tensors; empty if they are."""
    setting, chosen_by = env.kernels(chosen)
    if setting in ("reference", "triton"):
        return chosen_by
    if calls.UNBUILT_REASON:
        return calls.UNBUILT_REASON
    built = calls.module.build_info()["cuda"]
    if not built:
        return (
            "the native module is built without CUDA: the build found no GPU or no nvcc (ZCOMM_CUDA=ON needs only nvcc)"
        )
    if reason := driver_unavailable_reason(built):
        return reason
    if setting != "cuda" and not on_triton.unavailable_reason("cuda"):
        return "Triton's kernels are the default: set ZCOMM_KERNELS=cuda to use these"
    return ""


@cache
def _is_chosen(chosen: str) -> bool:
    (setting, chosen_by), reason = env.kernels(chosen), unavailable_reason(chosen)
    if reason and setting == "cuda":
        raise BackendUnavailableError(f"{chosen_by}, but {reason}")
    return not reason


def serves(array: Tensor, *layouts: MessageLayout, draw: Draw | None = None) -> bool:
    """Whether these kernels encode or decode ``array``."""
    return (
        array.device.type == "cuda"
        and array.dtype in on_triton.DTYPES
        and draw is None
        and all(_is_served(layout) for layout in layouts)
        and _is_chosen(layouts[0].kernels)
    )


def _is_served(layout: MessageLayout) -> bool:
    return layout.codec.name in CODECS and (layout.block in BLOCKS or not layout.block) and not layout.is_rotated


def _launch(name: str, device: torch.device, layout: MessageLayout, *arguments: Any) -> None:
    # The kernel is queued on the current stream of its own device: behind what wrote its inputs there.
    with torch.cuda.device(device):
        calls.call(f"cuda_{name}", layout, *arguments, torch.cuda.current_stream(device).cuda_stream)


def _residual(blocks: ResidualBlocks | None) -> tuple[int, int, int, int, float] | None:
    if blocks is None:
        return None
    codes, scales, beta = blocks
    return codes.data_ptr(), scales.data_ptr(), codes.stride(0), scales.stride(0), beta


def _expected(messages: Tensor | None) -> tuple[int, int]:
    return (0, 0) if messages is None else (messages.data_ptr(), messages.shape[0])


def quantize(
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None,
    *, held: Tensor | None = None, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """As :func:`zcomm._kernels.kernels.quantize`, of x - held (N11) or with a residual (N10). ``draw`` is None."""
    assert draw is None, f"serves() says no: {draw}"
    if held is not None and not layout.codec.is_block:
        x, held = x.float() - held, None
    arrays = (*calls.array(x), message_stride, segment_stride)
    target = out.data_ptr(), layout.nbytes, layout.hash
    others = None if held is None else calls.array(held), _residual(residual), _expected(expected)
    _launch("quantize", x.device, layout, *calls.rows(layout, out.shape[0]), *arrays, *target, *others)


def decode(
    messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int,
    *, added: bool = False,
) -> None:  # fmt: skip
    """As :func:`zcomm._formats.reference.decode`, or added to ``out`` (N11)."""
    on_triton.launch_checked(_decode, messages, layout, out, message_stride, segment_stride, added=added)


def _decode(
    messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int,
    *, is_valid: Tensor, added: bool,
) -> None:  # fmt: skip
    arrays = (*calls.incoming(messages, layout), *calls.array(out), message_stride, segment_stride)
    _launch("decode", out.device, layout, *arrays, added, is_valid.data_ptr())


def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """As :func:`zcomm._formats.reference.decode_sum`."""
    on_triton.launch_checked(_decode_sum, messages, layout, out, segment_stride, divisor)


def _decode_sum(
    messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float, *, is_valid: Tensor
) -> None:
    arrays = (*calls.incoming(messages, layout), *calls.array(out), segment_stride)
    _launch("decode_sum", out.device, layout, *arrays, float(divisor), is_valid.data_ptr())


def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None,
    *, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """As :func:`zcomm._kernels.kernels.decode_sum_requantize`, or with a residual (N10). ``draw`` is None."""
    assert draw is None, f"serves() says no: {draw}"
    on_triton.launch_checked(_requantize, messages, layout, out, out_layout, residual, expected)


def _requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, residual: ResidualBlocks | None,
    expected: Tensor | None, *, is_valid: Tensor,
) -> None:  # fmt: skip
    target = (*calls.wire(out_layout), out.data_ptr(), out_layout.nbytes, out_layout.hash)
    arrays = (*calls.incoming(messages, layout), *target, _residual(residual), _expected(expected))
    _launch("decode_sum_requantize", out.device, layout, *arrays, is_valid.data_ptr())
