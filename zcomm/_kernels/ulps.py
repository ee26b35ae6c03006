"""Changes of bf16 and fp16 tensors in units in the last place, coded losslessly in one message.

Every bit pattern survives, NaNs and both zeros included. What is sparse or repeats costs little, and nothing costs more
than its own bits and a head. The format: :mod:`zcomm._formats.ulps_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._formats import ulps_reference
from zcomm._kernels import native_calls as calls
from zcomm.errors import LayoutError, MessageError

HEAD_NBYTES: int = ulps_reference.HEAD_NBYTES
"""Bytes at the start of a message from which :func:`message_nbytes` tells its length."""
DTYPES = (torch.bfloat16, torch.float16)


def is_compiled() -> bool:
    """Whether the compiled coder is at hand; the reference, with the same bits, is far slower."""
    return not calls.unavailable_reason() and hasattr(calls.module, "ulps_encode")


def max_message_nbytes(numel: int) -> int:
    """The most bytes that ``numel`` elements can cost: at most 1.01 * 2 * numel + 64."""
    return ulps_reference.max_message_nbytes(numel)


def encode(new: Tensor, old: Tensor, message: Tensor) -> int:
    """Write the change from ``old`` to ``new`` to the start of ``message``.

    Args:
        new: [n], contiguous, on the CPU, bf16 or fp16. Does not overlap ``message``.
        old: As ``new``.
        message: uint8 [at least max_message_nbytes(n)], all of which may be overwritten.

    Returns:
        The bytes used, a multiple of 4: the same for the same bits on every machine.

    Raises:
        LayoutError: A tensor has another dtype, shape, device or layout.
    """
    _check_values("new", new)
    _check_values("old", old)
    if old.dtype != new.dtype or old.numel() != new.numel():
        facts = f"old {old.dtype} [{old.numel()}], new {new.dtype} [{new.numel()}]"
        raise LayoutError(f"old and new must have one dtype and size: {facts}")
    _check_message("message", message, max_message_nbytes(new.numel()))
    if not is_compiled():
        return ulps_reference.encode(new, old, message)
    used: int = calls.module.ulps_encode(
        new.data_ptr(), old.data_ptr(), new.numel(), message.data_ptr(), message.numel()
    )
    return used


def decode(message: Tensor, values: Tensor) -> None:
    """Replace the old ``values`` by the new ones.

    Args:
        message: uint8, contiguous, on the CPU; bytes after the message are ignored.
        values: [n], contiguous, on the CPU, bf16 or fp16: the bits of ``old``.

    Raises:
        LayoutError: A tensor has another dtype, shape, device or layout.
        MessageError: The message is damaged, of another version or of another size. ``values`` are then as before, but
            if somebody made the damage fit the checksums they are undefined. Nothing outside them is written.
    """
    _check_values("values", values)
    _check_message("message", message, 0)
    if not is_compiled():
        ulps_reference.decode(message, values)
        return
    try:
        calls.module.ulps_decode(message.data_ptr(), message.numel(), values.data_ptr(), values.numel())
    except ValueError as error:
        raise MessageError(f"changes in ulps, {values.numel()} elements: {error}") from error


def message_nbytes(head: Tensor) -> int:
    """The length in bytes of the message whose first ``HEAD_NBYTES`` bytes are ``head``, uint8 on the CPU.

    Raises:
        LayoutError: ``head`` has another dtype, device or layout.
        MessageError: It is not the start of a message.
    """
    _check_message("head", head, 0)
    if not is_compiled():
        return ulps_reference.message_nbytes(head)
    try:
        nbytes: int = calls.module.ulps_message_nbytes(head.data_ptr(), head.numel())
    except ValueError as error:
        raise MessageError(f"changes in ulps: {error}") from error
    return nbytes


def _check_values(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
        facts = f"dtype={tensor.dtype}, device={tensor.device}, shape={tuple(tensor.shape)}, stride={tensor.stride()}"
        raise LayoutError(f"{name} must be 1-D, contiguous, on the CPU, bf16 or fp16: {facts}")


def _check_message(name: str, tensor: Tensor, least: int) -> None:
    if tensor.dtype != torch.uint8 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise LayoutError(f"{name} must be contiguous uint8 on the CPU: dtype={tensor.dtype}, device={tensor.device}")
    if tensor.numel() < least:
        raise LayoutError(f"{name} must have room for {least} bytes: nbytes={tensor.numel()}")
