"""The Triton kernels: whether they serve a call, and the check that messages are of the layout that was expected.

They serve CUDA tensors (with ZCOMM_KERNELS=cuda what zcomm._kernels.on_cuda leaves to them), and with ZCOMM_KERNELS=triton and
TRITON_INTERPRET=1 CPU tensors, in Triton's interpreter; what a layout says of kernels wins over ZCOMM_KERNELS. On CPU
tensors, and with ZCOMM_CHECK=1, another layout raises MessageError before anything is written. Otherwise a kernel
clears a flag on the device, for which the host does not wait: a later call raises MessageError
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
from zcomm._kernels.message_flags import flag_of
from zcomm.errors import BackendUnavailableError
from zcomm.triton_kernels import unavailable_reason as triton_unavailable_reason

ResidualBlocks: TypeAlias = tuple[Tensor, Tensor, float]
"""Codes int8 [num_rows, num_blocks, 256], scales bfloat16 [num_rows, num_blocks], both overwritten; beta."""

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.uint8})


def unavailable_reason(device_type: str, chosen: str = "auto") -> str:
    """Why the Triton kernels do not serve tensors on devices of this type; empty if they do."""
    setting, said_by = env.kernels(chosen)
    if setting == "reference" or (device_type == "cpu" and setting != "triton"):
        return said_by
    reason: str = triton_unavailable_reason(device_type)
    return reason


@cache
def _is_chosen(device_type: str, chosen: str) -> bool:
    (setting, said_by), reason = env.kernels(chosen), unavailable_reason(device_type, chosen)
    if reason and setting == "triton":
        raise BackendUnavailableError(f"{said_by}, but {reason}")
    if reason and device_type == "cuda" and setting != "reference":
        warnings.warn(f"zcomm uses its slow PyTorch reference kernels on GPUs: {reason}", RuntimeWarning, stacklevel=5)
    return not reason


def serves(array: Tensor, *layouts: MessageLayout) -> bool:
    """Whether these kernels encode or decode ``array``; float64 has none."""
    return (
        array.device.type in ("cpu", "cuda")
        and array.dtype in DTYPES
        and all(layout.codec.dtype != torch.float64 for layout in layouts)
        and _is_chosen(array.device.type, layouts[0].kernels)
    )


@cache
def _launch() -> ModuleType:
    """The launchers; importing them imports Triton, which takes a while."""
    return importlib.import_module("zcomm.triton_kernels.launch")


def checked(
    launch: Callable[..., None], messages: Tensor, layout: MessageLayout, *arguments: Any, **options: Any
) -> None:
    """Call ``launch`` of a kernel that decodes ``messages``, and clears its argument ``is_valid`` on another layout."""
    is_checked_here = messages.device.type == "cpu" or env.is_set("ZCOMM_CHECK")
    if layout.codec.is_block and is_checked_here:
        reference.check_hashes(messages, layout)
    flag = _unread() if messages.device.type == "cpu" else flag_of(messages.device).used_by(layout.operation)
    launch(messages, layout, *arguments, is_valid=flag, **options)


@cache
def _unread() -> Tensor:
    """For kernels in the interpreter, whose messages have been checked."""
    return torch.ones(1, dtype=torch.int32)


def fuses_residual(array: Tensor, layout: MessageLayout, *others: MessageLayout) -> bool:
    """Whether ``array`` is encoded as ``layout`` and its residual renewed in one launch."""
    return layout.codec.is_block and layout.block & (layout.block - 1) == 0 and serves(array, layout, *others)


def _residual(blocks: ResidualBlocks | None) -> Any:
    return None if blocks is None else _launch().Residual(*blocks)


def quantize(
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None,
    *, held: Tensor | None = None, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """As :func:`zcomm._kernels.kernels.quantize`; of x - held, or with a residual (N10)."""
    options = {"held": held, "residual": _residual(residual), "expected": expected}
    _launch().quantize(x, layout, out, message_stride, segment_stride, draw, **options)


def decode(
    messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int,
    *, added: bool = False,
) -> None:  # fmt: skip
    """As :func:`zcomm._formats.reference.decode`; or added to ``out`` (N11)."""
    checked(_launch().decode, messages, layout, out, message_stride, segment_stride, added=added)


def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """As :func:`zcomm._formats.reference.decode_sum`."""
    checked(_launch().decode_sum, messages, layout, out, segment_stride, divisor)


def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None,
    *, residual: ResidualBlocks | None = None, expected: Tensor | None = None,
) -> None:  # fmt: skip
    """As :func:`zcomm._kernels.kernels.decode_sum_requantize`; or with a residual (N10)."""
    options = {"residual": _residual(residual), "expected": expected}
    checked(_launch().decode_sum_requantize, messages, layout, out, out_layout, draw, **options)
