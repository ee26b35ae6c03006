"""Was a tensor modified in place since? Without keeping its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm import StateError

__all__ = ["Watch", "modified"]


class Watch:
    """Remembers the version of ``tensor``, which autograd counts at every modification."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias: Tensor | None = None
        if not tensor.is_inference():
            self._alias = tensor.detach()  # shares the count; its own memory is dropped next
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._version = self._alias._version

    def check(self, shape: torch.Size) -> None:
        """Raise if it was modified."""
        if self._alias is not None and self._alias._version != self._version:
            raise modified(shape, self._alias._version, self._version)


def modified(shape: torch.Size, version: int, expected: int) -> StateError:
    """The error for an input that was modified."""
    return StateError(
        "an input of a checkpointed function was modified by an inplace operation after it was saved, and the function "
        f"cannot be computed again from it: shape={tuple(shape)}, version={version}, expected {expected}. Modify a "
        "clone of it"
    )
