"""Host memory for transfers: aligned for direct I/O, page-locked where there is CUDA, used again and again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zcomm import LayoutError
from zcomm._kernels import kernels
from zero._storage.poison import poison

MAX_WASTE = 2  # a free buffer serves if it is at most so many times as large as needed


def aligned_bytes(nbytes: int, *, is_pinned: bool = False) -> Tensor:
    """A uint8 tensor [nbytes] in host memory whose address suits direct I/O.

    Raises:
        MemoryError: There is not so much.
    """
    alignment = int(kernels.native().FILE_ALIGNMENT)
    try:
        whole = torch.empty(nbytes + alignment, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError(f"no host memory for a buffer of {nbytes} bytes: {error}") from error
    start = -whole.data_ptr() % alignment
    return whole[start : start + nbytes]


class HostBuffers:
    """Buffers that are given back and taken again. Thread-safe.

    Args:
        pins_memory: Page-lock them where there is CUDA.
    """

    def __init__(self, *, pins_memory: bool = True) -> None:
        self._is_pinned = pins_memory and torch.cuda.is_available()
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, taken or not."""
        with self._lock:
            return sum(b.numel() for b in (*self._free, *self._taken.values()))

    def take(self, nbytes: int) -> Tensor:
        """A uint8 tensor of ``nbytes`` rounded up to whole pages, with any content.

        Raises:
            MemoryError: There is not so much.
        """
        alignment = int(kernels.native().FILE_ALIGNMENT)
        nbytes = -(-nbytes // alignment) * alignment
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.numel() <= MAX_WASTE * nbytes]
            if fitting:
                whole = min(fitting, key=Tensor.numel)
                self._free = [b for b in self._free if b is not whole]
            else:
                whole = aligned_bytes(max(nbytes, alignment), is_pinned=self._is_pinned)
            self._taken[whole.data_ptr()] = whole
        return whole[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Take back what :meth:`take` returned.

        Raises:
            LayoutError: It is another tensor, or was given back before.
        """
        with self._lock:
            whole = self._taken.pop(buffer.data_ptr(), None)
            if whole is None:
                raise LayoutError(f"not a buffer that was taken here: {buffer.numel()} bytes of {buffer.dtype}")
            poison(whole)
            self._free.append(whole)

    def clear(self) -> None:
        """Free the buffers that are not taken."""
        with self._lock:
            self._free.clear()
