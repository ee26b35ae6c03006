"""Views of gathered parameters that outlive the gather: a transposed weight that a layer keeps, a slice in a variable.

    released while it is viewed    the pool sets the buffer aside: the views have right values
    the parameter changes          the views become NaN, and any use of them is an error that names the parameter
    nobody views it any more       the pool has the buffer back

How long somebody keeps a view differs from rank to rank, and gloo's threads may do so for a moment: it decides on
memory alone, never on what is exchanged.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from zero._sharding.bucket import Bucket
from zero._sharding.buffer_pool import BufferPool, storage_of
from zero._sharding.released import outdate


def outdate_views(pool: BufferPool, buckets: Collection[Bucket]) -> None:
    """The parameters of ``buckets`` have new values: whoever uses a view of the old ones gets an error.

    Cost: a pass over all objects of the process if there are such views; else none.
    """
    found = {storage_of(each.buffer): each for each in pool.viewed() if each.of in buckets}
    if not found:
        return
    for tensor in _tensors():
        with torch._C.DisableTorchFunctionSubclass():
            aside, offset = found.get(storage_of(tensor)), int(tensor.storage_offset())
        if aside is not None and tensor is not aside.buffer and tensor.numel():  # without elements it shows nothing
            assert isinstance(aside.of, Bucket), "buffers are set aside for buckets"
            outdate(tensor, aside.of.layout.slots[aside.of.layout.slot_at(offset)].name)
    for aside in found.values():
        aside.of = None
        if aside.buffer.is_floating_point():
            aside.buffer.fill_(float("nan"))  # an array of NumPy's may see it


def _tensors() -> Iterator[Tensor]:
    """Every tensor with memory; not what only wraps tensors."""
    plain = Tensor.__torch_dispatch__
    for each in gc.get_objects():
        cls = type(each)
        if issubclass(cls, Tensor) and cls.__torch_dispatch__ is plain:
            with torch._C.DisableTorchFunctionSubclass():  # released parameters answer no questions
                has_memory = torch._C._has_storage(each)
            if has_memory:
                yield each
