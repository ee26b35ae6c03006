"""The native module, if it was built, and a call's arguments in its terms."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from zcomm import env
from zcomm.errors import MessageError
from zcomm.import_failure import import_failure
from zcomm.message import MessageLayout
from zcomm.on_triton import ResidualBlocks

try:
    from zcomm import _native
except ImportError as error:
    _native = None  # type: ignore[assignment]
    UNBUILT_REASON, IS_MISFIT = import_failure(error, sys.modules["zcomm"].__path__)
else:
    UNBUILT_REASON, IS_MISFIT = "", False

__all__ = [
    "DTYPE_NUMBERS",
    "IS_MISFIT",
    "UNBUILT_REASON",
    "array",
    "call",
    "incoming",
    "may_keep_residual",
    "module",
    "residual",
    "rows",
    "unavailable_reason",
    "wire",
]

module: Any = _native
"""None if it was not built."""
RESIDUAL_BLOCK = 256
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def unavailable_reason(chosen: str = "auto") -> str:
    """Why the native kernels cannot be used here; empty if they can."""
    setting, said_by = env.kernels(chosen)
    return said_by if setting == "reference" else UNBUILT_REASON


def call(name: str, layout: MessageLayout, *arguments: Any) -> None:
    """Call operation ``name``; what it refuses is a MessageError."""
    try:
        getattr(module, name)(*wire(layout), *arguments)
    except ValueError as error:
        raise MessageError(f"{layout.operation}, {layout.codec.name}, {layout.numel} elements: {error}") from error


def wire(layout: MessageLayout) -> tuple[int, int, bool]:
    """The format: codec, block, whether it is rotated."""
    return layout.codec.number, layout.block, layout.is_rotated


def rows(layout: MessageLayout, num_messages: int) -> tuple[int, int, int]:
    """The sizes: messages, segments of a message, elements of a segment."""
    return num_messages, layout.num_segments, layout.segment_numel


def incoming(messages: Tensor, layout: MessageLayout) -> tuple[int, ...]:
    """Sizes, address, stride and hash of messages that are read."""
    return *rows(layout, messages.shape[0]), messages.data_ptr(), layout.nbytes, layout.hash


def array(tensor: Tensor) -> tuple[int, int]:
    """Dtype and address."""
    return DTYPE_NUMBERS[tensor.dtype], tensor.data_ptr()


def may_keep_residual(layout: MessageLayout) -> bool:
    """Whether no block of the messages straddles two of a residual."""
    return RESIDUAL_BLOCK % layout.block == 0 or layout.block % RESIDUAL_BLOCK == 0


def residual(blocks: ResidualBlocks) -> tuple[int, int, int, int, float]:
    """Addresses and strides of codes and scales, and beta."""
    codes, scales, beta = blocks
    return codes.data_ptr(), codes.stride(0), scales.data_ptr(), scales.stride(0), beta
