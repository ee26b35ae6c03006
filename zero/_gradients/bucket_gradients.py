"""What is held of one bucket's gradients, and a reduction of it under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zcomm import NodeSums, Work
from zero._optim.gradient_files import FileGradient
from zero._sharding.bucket import Bucket
from zero._sharding.released import ReducedGradient
from zero._storage.host_gradient import HostGradient


@dataclass(slots=True)
class BucketGrads:
    """The gradients of one bucket."""

    bucket: Bucket
    dtype: torch.dtype
    result: Tensor | None = None
    """This rank's shard of the reduced sum; below stage 2 the buffer's own rows. None from stage 2 on with ``host``."""
    host: HostGradient | FileGradient | None = None
    """The sum, if it rests in host memory or in a file."""
    spare: HostGradient | None = None
    """Another such sum, which an update that is under way may still read."""
    in_node: NodeSums | None = None
    """``mode="delta_hpz"``: sums of the node that are not reduced between the nodes yet."""
    full: Tensor | None = None
    """Local gradients that are not reduced yet; permanent at stages 0 and 1."""
    carry: Tensor | None = None
    """Stages 0 and 1: an earlier sum of this step, moved out of the way of the next local gradients."""
    written: list[bool] = field(default_factory=list)
    """Slots of ``full`` that hold a local gradient."""
    stand_ins: list[ReducedGradient] = field(default_factory=list)
    """What ``.grad`` shows from stage 1 on."""
    shown: list[Tensor | None] = field(default_factory=list)
    """What ``.grad`` shows now; anything else there is a user's."""
    used: list[bool] = field(default_factory=list)
    """Parameters that have had a gradient since zero_grad, on any rank once agreed."""
    reduced: list[bool] = field(default_factory=list)
    """Those of which a gradient that was agreed on is held: the same on every rank."""
    agreed: bool = False
    """Whether any rank has used any of them, whatever users have cleared since."""
    arrived: set[int] = field(default_factory=set)
    """Parameters whose gradients came in the running backward."""
    repeated: dict[int, Tensor] = field(default_factory=dict)
    """By parameter, the sums in ``dtype`` of gradients that came again before they were reduced, which ``full`` is too
    narrow for; and of those that came while an exchange still reads ``full``."""
    has_result: bool = False
    is_gathered: bool = True
    """Stage 0: the other ranks' shards are in ``full`` too."""

    def put(self, slot: int, grad: Tensor, full: Tensor) -> None:
        """Add the gradient of a parameter to what ``full`` holds of it."""
        at = self.bucket.layout.slots[slot]
        grad = grad.detach() if grad.requires_grad else grad  # create_graph=True: the buffer would be part of the graph
        view = full[at.offset : at.offset + at.numel].view(at.shape)
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

    def put_aside(self, slot: int, grad: Tensor) -> None:
        """Take the gradient of a parameter over, but leave ``full`` alone until :meth:`complete`."""
        if slot in self.repeated:
            self.repeated[slot].add_(grad)
        else:
            self.repeated[slot] = grad.to(self.dtype, copy=True)
        self.used[slot] = True
        self.arrived.add(slot)

    @property
    def has_local(self) -> bool:
        """Whether there are local gradients that are not reduced yet."""
        return any(self.written) or bool(self.repeated)

    def complete(self, full: Tensor) -> None:
        """Write to ``full``, which will be reduced, all that it lacks: sums of what came again, and zeros."""
        layout = self.bucket.layout
        for slot, total in self.repeated.items():
            start = layout.slots[slot].offset
            full[start : start + total.numel()].copy_(total.view(-1))
            self.written[slot] = True
        self.repeated.clear()
        for at, is_written in zip(layout.slots, self.written, strict=True):
            if not is_written:
                full[at.offset : at.offset + at.numel].zero_()
        for start, stop in layout.gaps:
            full[start:stop].zero_()

    def drop(self, slot: int, row: int) -> None:
        """Forget the gradient of a parameter: what is summed up in this rank's ``row``, and what is not reduced yet."""
        self.used[slot] = self.written[slot] = self.reduced[slot] = False
        self.shown[slot] = None
        self.repeated.pop(slot, None)
        if not any(self.used):
            self.has_result = False
            if self.host is not None:
                self.host.clear()
        at, base = self.bucket.layout.slots[slot], row * self.bucket.layout.shard_numel
        pieces = [piece for piece in self.bucket.layout.pieces(row) if piece.slot == slot]

        def forget(sums: Tensor) -> None:
            for piece in pieces:
                sums[piece.start - base : piece.stop - base].zero_()

        if self.host is not None:
            if self.has_result:
                self.host.change(forget)
        elif self.result is not None:
            forget(self.result)
        if self.carry is not None:
            forget(self.carry)
        if self.full is not None:
            self.full[at.offset : at.end].zero_()

    @property
    def has_sums(self) -> bool:
        """Whether gradients are summed up inside the node only."""
        return self.in_node is not None and not self.in_node.is_empty

    @property
    def is_in_file(self) -> bool:
        """Whether the sum rests in a file."""
        return isinstance(self.host, FileGradient)


@dataclass(slots=True)
class InFlight:
    """A reduction under way."""

    grads: BucketGrads
    works: list[Work]
    borrowed: list[Tensor]
    """Buffers of the pool, which go back when it has ended."""
    output: Tensor | None
    """None: the sums of the node."""
