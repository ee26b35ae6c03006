"""The gradients of one bucket: local, reduced and accumulated; and a reduction in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zcomm import Work
from zero._sharding.bucket import Bucket
from zero._sharding.released import ReducedGradient
from zero._storage.gradient_store import GradientStore


@dataclass(slots=True)
class BucketGrads:
    """The gradients of one bucket."""

    bucket: Bucket
    dtype: torch.dtype
    store: GradientStore
    """The reduced sum of this rank's shard."""
    spare: GradientStore | None = None
    """A second one: a delayed update may still read the first while the next step's gradients arrive."""
    rows: Tensor | None = None
    """Stages 0 and 1: this rank's rows of ``full``, which reductions write."""
    full: Tensor | None = None
    """The buffer of local gradients that are not reduced yet; permanent at stages 0 and 1."""
    written: list[bool] = field(default_factory=list)
    """Slots of ``full`` that hold a local gradient."""
    stand_ins: list[ReducedGradient] = field(default_factory=list)
    """The values of ``.grad`` from stage 1 on."""
    shown: list[Tensor | None] = field(default_factory=list)
    """What this library has set ``.grad`` to; anything else there is a user's."""
    used: list[bool] = field(default_factory=list)
    """Parameters with a gradient since zero_grad: on this rank; after the agreement of a backward, on any rank."""
    reduced: list[bool] = field(default_factory=list)
    """Parameters with a reduced gradient: the same on every rank."""
    agreed: bool = False
    """Whether any rank had a gradient for any of them, even if users have cleared it since."""
    arrived: set[int] = field(default_factory=set)
    """Parameters whose gradients arrived in the running backward."""
    repeated: dict[int, Tensor] = field(default_factory=dict)
    """By parameter, sums in ``dtype`` of several gradients that are not reduced yet, where ``full`` has a narrower
    dtype; and of gradients that arrived while an exchange reads ``full``."""
    num_in_flight: int = 0
    """Reductions of it that are not finished."""
    has_result: bool = False
    is_gathered: bool = True
    """Stage 0: whether the other ranks' shards are in ``full``, too."""

    def put(self, slot: int, grad: Tensor, full: Tensor) -> None:
        """Add the gradient of a parameter to ``full``."""
        at = self.bucket.layout.slots[slot]
        grad = _plain(grad)
        view = full.as_strided(at.shape, at.strides, full.storage_offset() + at.offset)
        if slot in self.repeated:
            self.repeated[slot].add_(grad)
        elif not self.written[slot]:
            view.copy_(grad)
        elif full.dtype == self.dtype:
            view.add_(grad)
        else:
            self.repeated[slot] = view.to(self.dtype).add_(grad)
        self.written[slot] = self.used[slot] = True
        self.arrived.add(slot)

    def defer(self, slot: int, grad: Tensor) -> None:
        """Keep the gradient of a parameter outside of ``full``, which an exchange reads, until :meth:`complete`."""
        grad = _plain(grad)
        if slot in self.repeated:
            self.repeated[slot].add_(grad)
        else:
            self.repeated[slot] = grad.to(self.dtype, copy=True)
        self.used[slot] = True
        self.arrived.add(slot)

    @property
    def has_local(self) -> bool:
        """Whether there are local gradients to reduce."""
        return any(self.written) or bool(self.repeated)

    def complete(self, full: Tensor) -> None:
        """Fill ``full`` for its reduction: sums of repeated gradients, and zeros where there is no gradient."""
        layout = self.bucket.layout
        for slot, total in self.repeated.items():
            start = layout.slots[slot].offset
            full[start : start + total.numel()].copy_(total.view(-1))
            self.written[slot] = True
        self.repeated.clear()
        for at, is_written in zip(layout.slots, self.written, strict=True):
            if not is_written:
                full[at.offset : at.offset + at.numel].zero_()
        for start, stop in layout.gaps:  # L2: a NaN left in padding would become the scale of a quantization block
            full[start:stop].zero_()

    def drop(self, slot: int) -> None:
        """Drop the gradient of a parameter: its reduced part in this rank's shard, and its local part."""
        self.used[slot] = self.written[slot] = self.reduced[slot] = False
        self.shown[slot] = None
        self.repeated.pop(slot, None)
        if not any(self.used):
            self.has_result = False
            self.store.clear()
        at = self.bucket.layout.slots[slot]
        pieces = [piece for piece in self.bucket.layout.pieces(self.bucket.row) if piece.slot == slot]

        def forget(sums: Tensor) -> None:
            for piece in pieces:
                sums[piece.start : piece.stop].zero_()

        if self.has_result or self.store.is_on_device:
            self.store.change(forget)
        if self.full is not None:
            self.full[at.offset : at.end].zero_()


@dataclass(slots=True)
class InFlight:
    """A reduction in flight."""

    grads: BucketGrads
    works: list[Work]
    borrowed: list[Tensor]
    """Buffers of the pool, given back when it is complete: not before, as the exchange reads and writes them."""
    output: Tensor | None
    """The mean; None: it goes to the node sums."""


def _plain(grad: Tensor) -> Tensor:
    """``grad`` without a graph, which the buffer would join (create_graph=True), and dense (sparse=True)."""
    grad = grad.detach() if grad.requires_grad else grad
    return grad if grad.layout is torch.strided else grad.to_dense()
