"""One bucket: its parameters, the memory that rests on this rank, and the states its full parameters go through.

stage   full buffer          shard                    master (float32)                  gradients at rest
0       always               = full                   = full, or a float32 copy         full buffer
1, 2    always               own rows of full         = shard, or a float32 copy        full buffer | shard
3       from the pool        the only thing kept      = shard, or a float32 copy        shard
1 - 3, offloaded states      as above                 a float32 copy in host memory     shard in host memory

Frozen parameters have no master but the shard; where stages 1 and 2 quantize weights, an exact copy of it. With
``mode="delta"`` trainable shards are memory of their own there, and own rows what receivers hold of them.

SHARDED --issue a gather--> GATHERING --wait--> FULL --release--> SHARDED          (below stage 3: always FULL)
                            GATHERING --abandon--> SHARDED

At stage 3 a resident bucket, of small parameters, is always FULL, too: gathered again whenever its shards have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zcomm import StateError, Topology
from zero._sharding.layout import BucketLayout, ShardPiece
from zero._sharding.released import hide, is_released, not_picklable, placeholder, show
from zero._sharding.stages import Stage
from zero._storage.host_memory import HostMemory
from zero._storage.parameter_storage import ParameterRests
from zero._storage.shard_storage import InPlace, ShardRest


class BucketState(Enum):
    """Where the full parameters are."""

    SHARDED = "sharded"  # nowhere: parameters are released
    GATHERING = "gathering"  # a buffer is being filled
    FULL = "full"  # parameters are views of the buffer


TRANSITIONS = {
    BucketState.SHARDED: {BucketState.GATHERING},
    BucketState.GATHERING: {BucketState.FULL, BucketState.SHARDED},
    BucketState.FULL: {BucketState.SHARDED},
}


@dataclass(slots=True)
class ShardInfo:
    """The one attribute set on a managed parameter, ``param.zero_shard``; None on what was pickled."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    bucket: Bucket
    slot: int
    owner: object
    """The ZeroOptimizer's :class:`zero._runtime.runtime.Runtime`."""
    num_updates: int = 0
    """How often the library itself has let autograd know of new values: so much of the parameter's version."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """What is unpickled is managed by nobody. Whole parameters of stage 3 are not to be taken for a whole model."""
        stage: Stage | None = getattr(self.owner, "stage", None)
        if stage is None or stage.shards_parameters:
            raise not_picklable(repr(self.name))
        return type(None), ()


def is_managed(param: Tensor) -> bool:
    """Whether a ZeroOptimizer or zero.Init holds ``param``."""
    return getattr(param, "zero_shard", None) is not None


def bump_versions(params: list[nn.Parameter]) -> None:
    """Let autograd know that the library has changed ``params``: it refuses what it has saved of them."""
    increment_version(params)
    for param in params:
        if is_managed(param):
            param.zero_shard.num_updates += 1  # type: ignore[attr-defined]


def num_writes(param: nn.Parameter) -> int:
    """How often others than the library have written to ``param``, counted from anywhere; released ones, too."""
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    with torch._C.DisableTorchFunctionSubclass():
        return param._version - (0 if info is None else info.num_updates)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of optimizer states and master weights: at least float32."""
    return dtype if dtype == torch.float64 else torch.float32


class Bucket:
    """Parameters of one unit that share dtype and requires_grad, laid flat."""

    def __init__(
        self,
        index: int,
        name: str,
        layout: BucketLayout,
        params: list[nn.Parameter],
        *,
        is_resident: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.layout = layout
        self.params = params
        self.dtype = params[0].dtype
        self.device = params[0].device
        self.is_trainable = params[0].requires_grad
        self.state = BucketState.SHARDED
        self.full: Tensor | None = None
        self.shard = torch.empty(0)
        self.rest: ShardRest = InPlace(self.shard)
        self.master = torch.empty(0)
        self.gaps: list[tuple[int, int]] = []
        """The runs of the master that hold no parameter, and stay zero."""
        self.host: HostMemory | None = None
        """Where master, moments and gradients rest, and are updated; None: with the parameters."""
        self.staged: Tensor | None = None
        """Where an update writes that others are not to see yet; None: to where the shard rests."""
        self.empties = [placeholder(p.shape, p.dtype, p.device) for p in params]
        # Who needs the full parameters now: running forwards, a running backward, somebody who holds a view.
        self.forward_depth = 0
        self.is_held_by_backward = False
        self.is_pinned = False
        self.is_resident = is_resident

    @property
    def is_needed(self) -> bool:
        """Whether anybody needs the full parameters now."""
        return self.forward_depth > 0 or self.is_held_by_backward or self.is_pinned

    def flatten(self) -> Tensor:
        """A new flat buffer with the parameters' values and zeros between them, and for those that are released."""
        full = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        for param, view in zip(self.params, self.views(full), strict=True):
            if not is_released(param):
                view.copy_(param.detach())
        return full

    def views(self, full: Tensor) -> list[Tensor]:
        """``full`` as one view for each parameter."""
        return [full[s.offset : s.offset + s.numel].view(s.shape) for s in self.layout.slots]

    def settle(
        self,
        full: Tensor,
        stage: Stage,
        topology: Topology,
        rests: ParameterRests,
        *,
        keeps_exact_master: bool,
        keeps_exact_shard: bool,
    ) -> None:
        """Take what this rank keeps of the initial values ``full``, by the table above.

        Args:
            full: All of it; kept below stage 3.
            stage: A row of the table.
            topology: The ranks.
            rests: Where shards rest.
            keeps_exact_master: Beside ``full``, which has quantized values.
            keeps_exact_shard: If it is trainable, beside ``full``, which changes are added to.
        """
        row = topology.shard_index("local")
        numel = self.layout.shard_numel
        own = full[row * numel : (row + 1) * numel]
        if stage.shards_parameters:
            self.rest = rests.place(self.index, own, updates_on_host=self.host is not None)
            self.shard = self.rest.shard
            self._move(BucketState.GATHERING)
            self.full = full
            self.expose()
            if not self.is_resident:
                self.release()
        else:
            self.shard = own if stage.shards_states else full
            if keeps_exact_shard and self.is_trainable:
                self.shard = own.clone()
            self.rest = rests.leave(self.shard, updates_on_host=self.host is not None)
            self.state = BucketState.GATHERING
            self.full = full
            self.expose()
        self.gaps = self.layout.gaps_of(row) if stage.shards_states else list(self.layout.gaps)
        initial = own if stage.shards_states else full
        dtype = master_dtype(self.dtype) if self.is_trainable else self.dtype
        is_own_master = not self.is_trainable or self.rest.is_on_device
        if self.is_trainable and self.host is not None:
            self.master = self.host.empty(initial.numel(), dtype).copy_(initial)
        elif self.shard.dtype == dtype and is_own_master and not (keeps_exact_master and dtype.is_floating_point):
            self.master = self.shard
        else:
            self.master = initial.to(dtype, copy=True)

    def update_shard(self) -> None:
        """Bring the shard in line with the master."""
        if self.master is not self.shard:
            for start, stop in self.rest.ranges:
                self.begin_update(start, stop).copy_(self.master[start:stop])
                self.end_update(start, stop)

    @property
    def is_its_master(self) -> bool:
        """Whether the full parameters are the master themselves, not a rounding of it or behind it."""
        full = self.full
        return full is not None and full.untyped_storage().data_ptr() == self.master.untyped_storage().data_ptr()

    def begin_update(self, start: int, stop: int) -> Tensor:
        """Memory, where the master is updated, for new values of the shard; its contents are undefined."""
        if self.staged is not None:
            return self.staged[start:stop]
        return self.rest.target(start, stop, self.master.device)

    def end_update(self, start: int, stop: int) -> None:
        """What :meth:`begin_update` gave is filled."""
        if self.staged is None:
            self.rest.written(start, stop)

    def write_shard(self, values: Tensor) -> None:
        """Bring new values of the shard, from where the master is updated, to where it rests."""
        for start, stop in self.rest.ranges:
            self.rest.target(start, stop, self.master.device).copy_(values[start:stop])
            self.rest.written(start, stop)

    def _move(self, to: BucketState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"bucket {self.name!r} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def begin_gather(self, full: Tensor) -> None:
        """``full`` is being filled."""
        self._move(BucketState.GATHERING)
        self.full = full

    def expose(self) -> None:
        """The buffer is filled: parameters become views of it."""
        self._move(BucketState.FULL)
        assert self.full is not None, f"bucket {self.name!r} is full without a buffer"
        for param, view in zip(self.params, self.views(self.full), strict=True):
            show(param, view)

    def moved(self) -> list[int]:
        """The parameters of a full bucket that somebody gave other memory."""
        if self.state is not BucketState.FULL or self.full is None:
            return []
        begin, size = self.full.data_ptr(), self.full.element_size()
        each = enumerate(zip(self.layout.slots, self.params, strict=True))
        return [i for i, (at, param) in each if at.numel and param.data_ptr() != begin + at.offset * size]

    def take_back(self) -> None:
        """Copy what :meth:`moved` into the full buffer: somebody wrote ``param.data = values``."""
        for slot in self.moved():
            assert self.full is not None, f"bucket {self.name!r} is full without a buffer"
            param, view = self.params[slot], self.views(self.full)[slot]
            view.copy_(param.detach())
            param.data = view

    def release(self) -> Tensor:
        """Parameters let go of the buffer, which is returned."""
        self._move(BucketState.SHARDED)
        for param, empty in zip(self.params, self.empties, strict=True):
            hide(param, empty)
        full, self.full = self.full, None
        assert full is not None, f"bucket {self.name!r} was full without a buffer"
        return full

    def abandon(self) -> Tensor | None:
        """Give up a gather; returns the buffer, which is free if all its exchanges have ended."""
        self._move(BucketState.SHARDED)
        full, self.full = self.full, None
        return full

    def master_pieces(self, stage: Stage, shard_index: int) -> list[tuple[ShardPiece, Tensor]]:
        """The parameters this rank updates, as leaf views of the master weights, without the padding."""
        if not stage.shards_states:
            ends = [(i, s.offset, s.offset + s.numel) for i, s in enumerate(self.layout.slots) if s.numel]
            return [(ShardPiece(i, start, stop), self.master[start:stop]) for i, start, stop in ends]
        base = shard_index * self.layout.shard_numel
        pieces = self.layout.pieces(shard_index)
        return [(piece, self.master[piece.start - base : piece.stop - base]) for piece in pieces]

    def own_rows(self, stage: Stage, shard_index: int) -> Tensor:
        """The rows of the full bucket whose masters this rank has."""
        assert self.full is not None, f"rows of bucket {self.name!r}, which is not full"
        if not stage.shards_states:
            return self.full
        return self.full[shard_index * self.layout.shard_numel : (shard_index + 1) * self.layout.shard_numel]
