"""Saved-tensor hooks: keep autograd from holding gathered parameters between forward and backward.

Autograd would save views of a bucket's buffer, which is released before backward. The hooks save (bucket, offset, size,
stride) instead, and make the view again, gathering if needed, when backward asks for it. All other tensors are passed
to the hooks that a user has around the forward; activation checkpointing saves nothing at all.

torch does not compare the versions of tensors that hooks have saved, so this module does: a tensor that was changed in
place since, or a parameter changed by ``step()``, raises an error. Without it gradients would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm import StateError
from zero._gather.gatherer import Gatherer, IterationKind
from zero._sharding.bucket import Bucket, Hold
from zero._sharding.buffer_pool import storage_of
from zero._sharding.released import is_released

SavingHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs and unpacks tensors for autograd."""


class SavedView(NamedTuple):
    """What autograd keeps instead of a view of a bucket's buffer."""

    bucket: Bucket
    slot: int
    version: int
    """Of the parameter in that slot."""
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


SavedTensor = tuple[Tensor, int]
"""What autograd keeps of any other tensor: it, and its version. A plain tuple, which takes a tenth of a named one."""


class SavedElsewhere(NamedTuple):
    """A tensor packed by hooks around ours, with their unpack function."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _changed(what: str, tensor: Tensor, expected: int, version: int) -> StateError:
    return StateError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} of "
        f"shape {tuple(tensor.shape)} is at version {version}; expected version {expected} instead. A parameter is "
        "modified by optimizer.step(), too: run the forward again after it. For other tensors, "
        "torch.autograd.set_detect_anomaly(True) finds the operation that saved it"
    )


class SavedTensors:
    """The saved-tensor hooks of one model.

    Args:
        gatherer: Gathers its parameters.
        start_backward: Called when a backward asks for a parameter.
    """

    def __init__(self, gatherer: Gatherer, start_backward: Callable[[], None]) -> None:
        self._gatherer, self._start_backward = gatherer, start_backward
        self._ours = self._pack, self._recompute

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within the block, autograd saves no views of buffers."""
        hooks = self.start()
        try:
            yield
        finally:
            self.stop(hooks)

    def are_on_top(self) -> bool:
        """Whether autograd saves by hooks of this object, with no others above them."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and getattr(top[0], "func", None) in self._ours

    def start(self) -> SavingHooks | None:
        """Push the hooks, unless ours are on top already; returns them for :meth:`stop`.

        Also with gradients disabled: a module further in may enable them.
        """
        if self.are_on_top():
            return None
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack = None if outer is None else outer[0]
        if getattr(pack, "__module__", "") == "torch.utils.checkpoint":
            hooks = partial(self._recompute, outer), outer[1]
        else:
            hooks = partial(self._pack, outer), self._unpack
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        return hooks

    def stop(self, hooks: SavingHooks | None) -> None:
        """Pop ``hooks``, and no others, wherever they are on the stack after an interrupt.

        torch pops whatever is on top. If an interrupt ended a user's block around ours, that block has popped our hooks
        in the place of its own, which are still there: then those are popped here.
        """
        if hooks is None:
            return
        entered: list[Any] = []
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            entered.append(top)
            if top[0] is hooks[0]:
                break
        packs, outer = [pack for pack, _ in entered], hooks[0].args[0]  # type: ignore[attr-defined]
        left = hooks[0] if hooks[0] in packs else None if outer is None else outer[0]
        for each in reversed(entered):
            if each[0] is not left:
                torch._C._autograd._push_saved_tensors_default_hooks(*each)

    def bucket_under(self, tensor: Tensor) -> Bucket | None:
        """The bucket whose full parameters ``tensor`` is a view of; None if it is not such a view."""
        if tensor.layout is not torch.strided or (type(tensor) is not Tensor and is_released(tensor)):
            return None
        return self._gatherer.by_storage.get(storage_of(tensor))

    def _recompute(self, outer: SavingHooks, tensor: Tensor) -> Any:
        """Pack for torch's checkpoint: of a frozen parameter, which itself is released soon, a detached view."""
        is_released_later = not tensor.requires_grad and self.bucket_under(tensor) is not None
        return outer[0](tensor.detach() if is_released_later else tensor)

    def _pack(self, outer: SavingHooks | None, tensor: Tensor) -> SavedTensor | SavedView | SavedElsewhere:
        bucket = self.bucket_under(tensor)
        if bucket is None:
            if outer is not None:
                return SavedElsewhere(outer[0](tensor), outer[1])
            # A node that saved its own output would be a reference cycle, and leak. What detach() returns has the same
            # version counter.
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        offset = int(tensor.storage_offset())
        slot = bucket.layout.slot_at(offset)
        return SavedView(bucket, slot, bucket.params[slot]._version, offset, tensor.size(), tensor.stride())

    def _unpack(self, saved: SavedTensor | SavedView | SavedElsewhere) -> Tensor:
        if isinstance(saved, SavedElsewhere):
            return saved.unpack(saved.packed)
        if not isinstance(saved, SavedView):
            tensor, expected = saved
            if tensor._version != expected:
                raise _changed("a tensor", tensor, expected, tensor._version)
            return tensor
        bucket, param = saved.bucket, saved.bucket.params[saved.slot]
        with torch._C.DisableTorchFunctionSubclass():
            version = param._version
        if version != saved.version:
            raise _changed(f"parameter {bucket.layout.slots[saved.slot].name!r}", param, saved.version, version)
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_backward:
            self._start_backward()
            bucket.hold(Hold.BACKWARD)
        else:
            bucket.hold(Hold.VIEW)
        self._gatherer.acquire(bucket, IterationKind.TRAINING if is_in_backward else None)
        assert bucket.full is not None, f"bucket {bucket.name!r} is FULL without a buffer"
        view = bucket.full.as_strided(saved.size, saved.stride, saved.offset)
        return view.clone() if torch.is_grad_enabled() else view  # create_graph=True: this backward saves it again
