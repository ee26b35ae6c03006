"""Views of gathered parameters that outlive the gather: a transposed weight that a layer keeps, a slice in a variable.

    released while it is viewed    the pool lets go of the buffer: the views have it for themselves, with right values
    the parameter changes          the views are taken its memory from, and any use of them names the parameter

How long somebody keeps a view differs from rank to rank: it decides on memory alone, never on what is exchanged.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero.bucket import Bucket
from zero.released import outdate

__all__ = ["OutlivingViews", "has_other_views"]


def has_other_views(part: Tensor) -> bool:
    """Whether anything refers to the memory of ``part``, except for ``part`` and the whole tensor it is cut from."""
    return _num_uses(part) > _num_uses_of_part()


def _num_uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _num_uses_of_part() -> int:
    whole = torch.empty(2, device="cpu")
    part = whole[:1]
    return _num_uses(part)


class OutlivingViews:
    """The memory that was left to views, by the bucket whose parameters they show."""

    def __init__(self) -> None:
        self._left: list[tuple[StorageWeakRef, Bucket]] = []

    @property
    def are_left(self) -> bool:
        """Whether there has been any since parameters changed."""
        return bool(self._left)

    def add(self, full: Tensor, bucket: Bucket) -> None:
        """``full``, which had the parameters of ``bucket``, is left to those who view it."""
        self._left = [(memory, of) for memory, of in self._left if not memory.expired()]
        self._left.append((StorageWeakRef(full.untyped_storage()), bucket))

    def outdate(self, buckets: Collection[Bucket]) -> None:
        """The parameters of ``buckets`` have new values: whoever uses a view of the old ones gets an error.

        Cost: a pass over all objects of the process if such views are alive; else none.
        """
        found = [(memory, of) for memory, of in self._left if of in buckets and not memory.expired()]
        if not found:
            return
        self._left = [pair for pair in self._left if pair[1] not in buckets]
        bucket_of = {memory.cdata: bucket for memory, bucket in found}
        for tensor in _tensors():
            with torch._C.DisableTorchFunctionSubclass():
                bucket = bucket_of.get(tensor.untyped_storage()._cdata)
            if bucket is not None:
                outdate(tensor, _name_at(bucket, tensor.storage_offset()))
        for memory, bucket in found:
            storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
            if storage is not None and bucket.dtype.is_floating_point:  # not only tensors: an array of NumPy's, say
                torch.empty(0, dtype=bucket.dtype, device=bucket.device).set_(storage).fill_(float("nan"))


def _tensors() -> Iterator[Tensor]:
    """Every tensor that has memory of its own or views another's; not what only wraps tensors."""
    plain = Tensor.__torch_dispatch__
    for each in gc.get_objects():
        cls = type(each)
        if issubclass(cls, Tensor) and cls.__torch_dispatch__ is plain:
            with torch._C.DisableTorchFunctionSubclass():  # released parameters answer no questions
                has_memory = torch._C._has_storage(each)
            if has_memory:
                yield each


def _name_at(bucket: Bucket, offset: int) -> str:
    return bucket.layout.slots[bucket.layout.slot_at(offset)].name
