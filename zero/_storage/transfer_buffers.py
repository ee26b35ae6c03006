"""Pool of host buffers for transfers: aligned for direct I/O, and page-locked where there is CUDA."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zcomm import LayoutError
from zcomm._kernels import kernels
from zero._storage.poison import poison

MAX_WASTE = 2  # a free buffer may be at most so many times as large as needed


def aligned_bytes(nbytes: int, *, is_pinned: bool = False) -> Tensor:
    """A uint8 tensor [nbytes] in host memory, aligned for direct I/O.

    Raises:
        MemoryError: There is not enough.
    """
    alignment = int(kernels.native().FILE_ALIGNMENT)
    try:
        allocated = torch.empty(nbytes + alignment, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError(f"no host memory for a buffer of {nbytes} bytes: {error}") from error
    start = -allocated.data_ptr() % alignment
    return allocated[start : start + nbytes]


class HostBuffers:
    """A pool of reusable buffers. Thread-safe.

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
        """Bytes of all buffers, taken or free."""
        with self._lock:
            return sum(b.numel() for b in (*self._free, *self._taken.values()))

    def take(self, nbytes: int) -> Tensor:
        """A uint8 tensor of ``nbytes`` rounded up to whole pages, at least one; its contents are undefined.

        Raises:
            MemoryError: There is not enough.
        """
        alignment = int(kernels.native().FILE_ALIGNMENT)
        nbytes = max(-(-nbytes // alignment), 1) * alignment  # an empty tensor has no address to be known by
        with self._lock:
            fitting = [b for b in self._free if nbytes <= b.numel() <= MAX_WASTE * nbytes]
            if fitting:
                buffer = min(fitting, key=Tensor.numel)
                self._free = [b for b in self._free if b is not buffer]
            else:
                buffer = aligned_bytes(nbytes, is_pinned=self._is_pinned)
            self._taken[buffer.data_ptr()] = buffer
        return buffer[:nbytes]

    def give(self, buffer: Tensor) -> None:
        """Take back what :meth:`take` returned.

        Raises:
            LayoutError: It is another tensor, or was given back before.
        """
        with self._lock:
            taken = self._taken.pop(buffer.data_ptr(), None)
            if taken is None:
                raise LayoutError(
                    f"only a buffer of take() can be given back, once: numel={buffer.numel()}, dtype={buffer.dtype}"
                )
            poison(taken)
            self._free.append(taken)

    def clear(self) -> None:
        """Free the buffers that are not taken."""
        with self._lock:
            self._free.clear()
