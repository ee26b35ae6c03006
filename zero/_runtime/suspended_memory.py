"""Memory of tensors that goes to the host for a while: every tensor over it stays the object it is.

storage on the device --copy--> host memory;   the storage has no bytes
host memory --copy--> the same storage, at a new address
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zero._sharding.bucket import Bucket, BucketState
from zero._sharding.released import hide, show


class Away:
    """What of one optimizer is in host memory.

    Args:
        kinds: What it is.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.handles: list[Any] = []
        """Hooks to be removed when it is back."""
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._hidden: list[Bucket] = []

    def hide(self, buckets: Iterable[Bucket]) -> None:
        """Any use of parameters of ``buckets`` that are whole is an error from now on."""
        for bucket in buckets:
            if bucket.state is BucketState.FULL:
                self._hidden.append(bucket)
                for param, empty in zip(bucket.params, bucket.empties, strict=True):
                    hide(param, empty)

    def put(self, tensors: Iterable[Tensor], *, pins_memory: bool, non_blocking: bool) -> None:
        """Copy the memory of ``tensors``, which is that of others as well, and free it."""
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins_memory and tensor.is_cuda)
                copy.copy_(_bytes_of(storage), non_blocking=non_blocking)
                self._copies.append((storage, copy))
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self, *, non_blocking: bool) -> None:
        """Bring everything back."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=non_blocking)
        for bucket in self._hidden:
            assert bucket.full is not None, "a bucket that was whole has lost its buffer"
            for param, view in zip(bucket.params, bucket.views(bucket.full), strict=True):
                show(param, view)
        for handle in self.handles:
            handle.remove()

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(copy.numel() for _, copy in self._copies)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
