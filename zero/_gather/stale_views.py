"""Views of gathered parameters that outlive the gather, such as a transposed weight that a layer keeps.

    released while viewed     the pool sets the buffer aside: the views keep the right values
    the parameter changes     the views become NaN, and any use of them raises an error that names the parameter
    no view is left           the buffer goes back to the pool

How long a view lives differs from rank to rank, and gloo's threads may keep one for a moment. So it affects memory
only, never what is exchanged: else ranks would make different exchanges, and deadlock.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from zero._sharding.bucket import Bucket
from zero._sharding.buffer_pool import BufferPool, storage_of
from zero._sharding.released import mark_stale


def mark_views_stale(pool: BufferPool, buckets: Collection[Bucket]) -> None:
    """The parameters of ``buckets`` have new values: make any use of a view of the old ones an error.

    Cost: if there are such views, a pass over all Python objects of the process; else none.
    """
    found = {storage_of(each.buffer): each for each in pool.viewed() if each.of in buckets}
    if not found:
        return
    for tensor in _tensors():
        with torch._C.DisableTorchFunctionSubclass():
            aside, offset = found.get(storage_of(tensor)), int(tensor.storage_offset())
        if aside is not None and tensor is not aside.buffer and tensor.numel():  # an empty view shows no old values
            assert isinstance(aside.of, Bucket), "buffers are set aside for buckets"
            mark_stale(tensor, aside.of.layout.slots[aside.of.layout.slot_at(offset)].name)
    for aside in found.values():
        aside.of = None
        if aside.buffer.is_floating_point():
            aside.buffer.fill_(float("nan"))  # for NumPy arrays and C++ code, which no class stops


def _tensors() -> Iterator[Tensor]:
    """Every tensor with memory of its own; not wrapper subclasses."""
    plain = Tensor.__torch_dispatch__
    for each in gc.get_objects():
        cls = type(each)
        if issubclass(cls, Tensor) and cls.__torch_dispatch__ is plain:
            with torch._C.DisableTorchFunctionSubclass():  # released parameters refuse the call otherwise
                has_memory = torch._C._has_storage(each)
            if has_memory:
                yield each
