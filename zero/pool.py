"""Reused flat buffers for what lives for a moment: gathered parameters and unreduced gradients.

Resizing storages costs three times the fill itself, so buffers are kept and handed out again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.poison import poison

__all__ = ["BufferPool"]


class BufferPool:
    """Buffers by dtype; the smallest that fits, at most twice as large as asked for, is handed out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._owned: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer of ``numel`` elements; its contents are undefined."""
        free = self._free.setdefault(dtype, [])
        fitting = [i for i, buffer in enumerate(free) if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            # The last to come back first: it is in the cache, and buffers beyond what a step needs lie idle.
            buffer = free.pop(min(reversed(fitting), key=lambda i: free[i].numel()))
        else:
            with torch.inference_mode(mode=False):  # it will serve training too
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._owned[buffer.untyped_storage().data_ptr()] = buffer
        self._taken.add(buffer.untyped_storage().data_ptr())
        return buffer[:numel]

    def drop_unused(self) -> None:
        """Free the buffers that nobody took since the last call: those of one-off uses, such as loading a model."""
        for free in self._free.values():
            for buffer in free.copy():
                at = buffer.untyped_storage().data_ptr()
                if buffer.numel() and at not in self._taken:
                    free[:] = [other for other in free if other is not buffer]
                    del self._owned[at]
        self._taken.clear()

    def clear(self) -> None:
        """Free every buffer that is not handed out."""
        for free in self._free.values():
            for buffer in free:
                del self._owned[buffer.untyped_storage().data_ptr()]
            free.clear()

    def give(self, buffer: Tensor) -> None:
        """Take back what :meth:`take` handed out."""
        whole = self._owned[buffer.untyped_storage().data_ptr()]
        poison(whole)
        self._free[whole.dtype].append(whole)

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, free or handed out."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._owned.values())
