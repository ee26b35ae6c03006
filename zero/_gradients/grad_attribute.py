"""The ``.grad`` attribute of trainable parameters: what a backward sets, and what a user assigned instead.

end of a backward --show--> stage 0: a view of the averaged gradient; other stages: a stand-in
param.grad = g, param.grad = None     --changed--> adopted by the next backward, or by step()
param.grad *= 2 (stage 0)             --edits----> the same memory: only the check for overflow is repeated
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm import StateError
from zero._gradients.bucket_gradients import BucketGrads
from zero._sharding.released import ReducedGradient

_LIST_OF_ONE = [object()]
NUM_REFERENCES = sys.getrefcount(_LIST_OF_ONE[0])
"""References that getrefcount sees for a stand-in that nothing but its bucket's list refers to."""


class UserGradient(NamedTuple):
    """A ``.grad`` that a user assigned."""

    grads: BucketGrads
    slot: int
    grad: Tensor | None
    """None: cleared."""

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.grads.bucket.layout.slots[self.slot].name


class GradAttributes:
    """The ``.grad`` of the parameters of ``all_grads``.

    Args:
        all_grads: Those of the trainable buckets.
        is_full: Stage 0: ``.grad`` is the gradient itself, and a user may write to it.
    """

    def __init__(self, all_grads: list[BucketGrads], *, is_full: bool) -> None:
        self._all, self._is_full = all_grads, is_full
        self._versions: list[int] = []
        """Autograd's versions of the gradient buffers when this library last wrote to them."""
        self._edits = [False] * len(all_grads)

    def show(self) -> None:
        """Set ``.grad`` of every used parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self._all:
                views = grads.bucket.views(grads.full) if self._is_full and grads.full is not None else None
                for i, (param, used) in enumerate(zip(grads.bucket.params, grads.used, strict=True)):
                    if used:
                        param.grad = grads.shown[i] = grads.stand_ins[i] if views is None else views[i]
        self.note_versions()

    def hide(self) -> None:
        """Clear ``.grad``: autograd would add the next gradient to it in place."""
        self.end_edits()
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self._all:
                for i, param in enumerate(grads.bucket.params):
                    param.grad = grads.shown[i] = None

    def forget(self) -> None:
        """As :meth:`hide`, and replace stand-ins that a user kept: they must not stand for a later gradient."""
        self.hide()
        self._edits = [False] * len(self._all)
        for grads in self._all:
            for i in range(len(grads.stand_ins)):
                if sys.getrefcount(grads.stand_ins[i]) > NUM_REFERENCES:
                    param, old = grads.bucket.params[i], grads.stand_ins[i]
                    grads.stand_ins[i] = ReducedGradient.of(old.zero_name, param, grads.dtype)

    def changed(self) -> list[UserGradient]:
        """The parameters whose ``.grad`` is not what this library set.

        Raises:
            StateError: It is the stand-in for another gradient.
        """
        found = []
        with torch._C.DisableTorchFunctionSubclass():
            for grads in self._all:
                for slot, (param, shown) in enumerate(zip(grads.bucket.params, grads.shown, strict=True)):
                    grad = param.grad
                    if grad is not shown or (self._is_full and grad is not None and _is_moved(grads, slot, grad)):
                        found.append(UserGradient(grads, slot, grad))
        for one in found:
            if isinstance(one.grad, ReducedGradient):
                raise StateError(
                    f"param.grad of {one.name!r} was set to a stand-in for a gradient of {one.grad.zero_name!r}, which "
                    "was dropped or has changed: set it to a tensor, such as zero.utils.safe_get_full_grad(param)"
                )
        return found

    def end_edits(self) -> None:
        """Record a user's edits so far: this library is about to write to the gradients."""
        self.edits()
        self._versions = []

    def note_versions(self) -> None:
        """What was written since :meth:`end_edits` was no user's edit."""
        if self._is_full:
            self._versions = [-1 if grads.full is None else grads.full._version for grads in self._all]

    def edits(self) -> list[bool]:
        """By bucket, whether a user has written to ``.grad`` since zero_grad(); only possible at stage 0."""
        for index, version in enumerate(self._versions):
            full = self._all[index].full
            if full is not None and full._version != version:
                self._edits[index] = True
        return self._edits


def _is_moved(grads: BucketGrads, slot: int, grad: Tensor) -> bool:
    """Whether ``.grad`` was given other memory, by ``param.grad.data = values``."""
    at, full = grads.bucket.layout.slots[slot], grads.full
    return bool(at.numel) and full is not None and grad.data_ptr() != full[at.offset :].data_ptr()
