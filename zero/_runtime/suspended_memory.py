"""``offload_states``: the device memory of tensors moved to host memory and back; the tensor objects stay.

suspend:  storage on the device --copy--> host memory; the storage is resized to 0 bytes
restore:  host memory --copy--> the same storage, at a new address
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zero._sharding.bucket import Bucket
from zero._sharding.released import make_full, make_released


class SuspendedMemory:
    """Device memory of one optimizer that is in host memory; ``kinds``: DeepSpeed's names of what was moved."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.handles: list[Any] = []
        """Hooks that make a forward raise meanwhile; removed by :meth:`restore`."""
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._hidden: list[Bucket] = []

    def hide(self, buckets: Iterable[Bucket]) -> None:
        """Make any use of full parameters of ``buckets`` an error from now on."""
        for bucket in buckets:
            if bucket.is_full:
                self._hidden.append(bucket)
                for param, empty in zip(bucket.params, bucket.released_data, strict=True):
                    make_released(param, empty)

    def put(self, tensors: Iterable[Tensor], *, pins_memory: bool, non_blocking: bool) -> None:
        """Move the storages of ``tensors`` to host memory; one that several tensors share is moved once."""
        for storage in new_storages(tensors, set()):
            is_pinned = pins_memory and storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            copy.copy_(_bytes_of(storage), non_blocking=non_blocking)
            self._copies.append((storage, copy))
        # A non-blocking copy may still read the memory that is freed here. That is safe: the caching allocator hands it
        # out again on this stream only, so whatever overwrites it runs after the copy.
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self, *, non_blocking: bool) -> None:
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=non_blocking)
        for bucket in self._hidden:
            for param, view in zip(bucket.params, bucket.views(bucket.buffer), strict=True):
                make_full(param, view)
        for handle in self.handles:
            handle.remove()

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(copy.numel() for _, copy in self._copies)


def new_storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """The storages under ``tensors``, each once, without empty ones and those whose address is in ``seen``."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
