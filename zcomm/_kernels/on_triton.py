"""The Triton kernels: which calls they serve, and the check that messages have the expected layout.

They serve CUDA tensors (with ZCOMM_KERNELS=cuda only what :mod:`zcomm._kernels.on_cuda` does not serve), and with
ZCOMM_KERNELS=triton and TRITON_INTERPRET=1 CPU tensors, in Triton's interpreter. A layout's ``kernels`` overrides
ZCOMM_KERNELS.

On CPU tensors, and with ZCOMM_CHECK=1, a message of another layout raises MessageError before anything is written.
Otherwise the kernel clears a flag on the device, and a later call raises: the host does not wait for the device
(:mod:`zcomm._kernels.message_flags`).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._formats import reference
from zcomm._formats.message import MessageLayout
from zcomm._formats.philox import Draw
from zcomm._kernels.codec_support import have_codecs
from zcomm._kernels.message_flags import flag_of
from zcomm.errors import BackendUnavailableError
from zcomm.triton_kernels import KINDS
from zcomm.triton_kernels import unavailable_reason as triton_unavailable_reason

ResidualBlocks: TypeAlias = tuple[Tensor, Tensor, float]
"""Codes int8 [num_rows, num_blocks, 256], scales bfloat16 [num_rows, num_blocks], both overwritten; beta."""

SETTINGS = {"cpu": ("triton",), "cuda": ("triton", "cuda")}
"""Settings that end here if these kernels lack a codec, by device: what on_cuda.py does not serve is left to them."""
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})


def unavailable_reason(device_type: str, chosen: str = "auto") -> str:
    """Why the Triton kernels are not used for tensors on devices of this type; empty if they are."""
    setting, chosen_by = env.kernels(chosen)
    if setting == "reference" or (device_type == "cpu" and setting != "triton"):
        return chosen_by
    reason: str = triton_unavailable_reason(device_type)
    return reason


@cache
def _is_chosen(device_type: str, chosen: str) -> bool:
    (setting, chosen_by), reason = env.kernels(chosen), unavailable_reason(device_type, chosen)
    if reason and setting == "triton":
        raise BackendUnavailableError(f"{chosen_by}, but {reason}")
    if reason and device_type == "cuda" and setting != "reference":
        warnings.warn(f"zcomm uses its slow PyTorch reference kernels on GPUs: {reason}", RuntimeWarning, stacklevel=5)
    return not reason


def serves(array: Tensor, *layouts: MessageLayout) -> bool:
    """Whether these kernels encode or decode ``array``; none supports float64."""
    return (
        array.device.type in ("cpu", "cuda")
        and array.dtype in DTYPES
        and have_codecs(KINDS, layouts, *SETTINGS[array.device.type])
        and _is_chosen(array.device.type, layouts[0].kernels)
    )


@cache
def _launch() -> ModuleType:
    """The launchers, imported at the first use: importing Triton is slow."""
    return importlib.import_module("zcomm.triton_kernels.launch")


def launch_checked(
    launch: Callable[..., None], messages: Tensor, layout: MessageLayout, *arguments: Any, **options: Any
) -> None:
    """Call ``launch``, which decodes ``messages`` and whose kernel clears ``is_valid`` if one has another layout."""
    is_checked_here = messages.device.type == "cpu" or env.is_set("ZCOMM_CHECK")
    if layout.codec.is_block and is_checked_here:
        reference.check_hashes(messages, layout)
    flag = _unused_flag() if messages.device.type == "cpu" else flag_of(messages.device).used_by(layout.operation)
    launch(messages, layout, *arguments, is_valid=flag, **options)


@cache
def _unused_flag() -> Tensor:
    """The flag of kernels in the interpreter. Nobody reads it: the host has checked the messages before the launch."""
    return torch.ones(1, dtype=torch.int32)


def fuses_residual(array: Tensor, layout: MessageLayout, *others: MessageLayout) -> bool:
    """Whether one launch encodes ``array`` as ``layout`` and updates its residual."""
    return layout.codec.is_block and layout.block & (layout.block - 1) == 0 and serves(array, layout, *others)


def _residual(blocks: ResidualBlocks | None) -> Any:
    return None if blocks is None else _launch().ResidualArguments(*blocks)


def quantize(
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None,
    *, held: Tensor | None = None, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """As :func:`zcomm._kernels.kernels.quantize`, of x - held (N11) or with a residual (N10)."""
    options = {"held": held, "residual": _residual(residual), "expected": expected}
    _launch().quantize(x, layout, out, message_stride, segment_stride, draw, **options)


def decode(
    messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int,
    *, added: bool = False,
) -> None:  # fmt: skip
    """As :func:`zcomm._formats.reference.decode`, or added to ``out`` (N11)."""
    launch_checked(_launch().decode, messages, layout, out, message_stride, segment_stride, added=added)


def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """As :func:`zcomm._formats.reference.decode_sum`."""
    launch_checked(_launch().decode_sum, messages, layout, out, segment_stride, divisor)


def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None,
    *, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """As :func:`zcomm._kernels.kernels.decode_sum_requantize`, or with a residual (N10)."""
    options = {"residual": _residual(residual), "expected": expected}
    launch_checked(_launch().decode_sum_requantize, messages, layout, out, out_layout, draw, **options)
