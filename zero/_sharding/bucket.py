"""One bucket: its parameters, what this rank stores of it, and the states of its full parameters.

stage   full buffer          shard                    master (float32)                  reduced gradients
0       always               = full                   = full, or a float32 copy         full buffer
1, 2    always               own rows of full         = shard, or a float32 copy        full buffer | shard
3       from the pool        stored between uses      = shard, or a float32 copy        shard
1 - 3, offloaded states      as above                 a float32 copy in host memory     shard in host memory

The shard is the master of frozen parameters; where stages 1 and 2 quantize weights, an exact copy of the shard. With
``mode="delta"``, trainable shards have memory of their own at these stages, and this rank's rows of the full buffer
hold what the receivers hold.

The life of the full parameters at stage 3, once they are partitioned; every other move raises:

    SHARDED --start_gathering--> GATHERING --expose--> FULL --release--> SHARDED
                                 GATHERING --abandon-> SHARDED
                                                       FULL --move--> RESTING --move--> FULL
                                                                      RESTING --release--> SHARDED

Below stage 3 a bucket is always FULL. So is, at stage 3, that of the small, persistent parameters: it is gathered again
when its shards change. A bucket that nothing holds (:class:`Hold`) rests if the plan has a next use for it soon, and is
released otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zcomm import StateError, Work
from zero._sharding.layout import BucketLayout, ShardPiece
from zero._sharding.released import is_released, make_full, make_released, nan_filled, not_picklable
from zero._sharding.stages import Stage
from zero._storage.parameter_storage import ParameterStorage
from zero._storage.shard_storage import InMemoryShard, ShardStorage
from zero._storage.state_storage import StateStorage


class BucketState(Enum):
    """State of the full parameters."""

    __hash__ = object.__hash__  # that of Enum runs in Python

    SHARDED = "sharded"  # parameters are released
    GATHERING = "gathering"  # exchanges fill a buffer
    FULL = "full"  # parameters are views of the buffer
    RESTING = "resting"  # the same, and nothing uses them until their next use


TRANSITIONS = {
    BucketState.SHARDED: {BucketState.GATHERING},
    BucketState.GATHERING: {BucketState.FULL, BucketState.SHARDED},
    BucketState.FULL: {BucketState.RESTING, BucketState.SHARDED},
    BucketState.RESTING: {BucketState.FULL, BucketState.SHARDED},
}


class Hold(Enum):
    """What needs the full parameters of a bucket."""

    __hash__ = object.__hash__  # as above

    FORWARD = "running forwards"  # one for each
    ACCESS = "blocks that read or write them"  # one for each
    BACKWARD = "the running backward"
    VIEW = "a view that has left its module, or a use outside of forward and backward"


IS_COUNTED = {Hold.FORWARD, Hold.ACCESS}


@dataclass(slots=True)
class ShardInfo:
    """The attribute ``param.zero_shard`` of a managed parameter; None on an unpickled copy."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    bucket: Bucket
    slot: int
    owner: object
    """The ZeroOptimizer's :class:`zero._runtime.runtime.Runtime`."""
    num_updates: int = 0
    """How many increments of the parameter's autograd version were the library's own."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """An unpickled parameter is not managed. At stage 3 pickling is refused: other parameters would lack values."""
        stage: Stage | None = getattr(self.owner, "stage", None)
        if stage is None or stage.shards_parameters:
            raise not_picklable(repr(self.name))
        return type(None), ()


def is_managed(param: Tensor) -> bool:
    """Whether a ZeroOptimizer or zero.Init holds ``param``."""
    return getattr(param, "zero_shard", None) is not None


def bump_versions(params: list[nn.Parameter]) -> None:
    """Tell autograd that ``params`` have new values.

    Without it, a backward of a forward before the step would compute gradients with the new values, silently.
    """
    increment_version(params)
    for param in params:
        if (info := getattr(param, "zero_shard", None)) is not None:
            info.num_updates += 1


def num_writes(param: nn.Parameter) -> int:
    """A counter of writes to ``param`` by others than this library, from any start; also of released parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return _num_writes(param)


def _num_writes(param: nn.Parameter) -> int:
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    return param._version - (0 if info is None else info.num_updates)


def has_same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bytes: a NaN equals itself, and float8 dtypes have no comparison of their own."""
    return a.device == b.device and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of optimizer states and master weights: at least float32."""
    return dtype if dtype == torch.float64 else torch.float32


class Bucket:
    """Parameters of one unit with the same dtype and requires_grad, in one flat buffer."""

    def __init__(
        self,
        index: int,
        name: str,
        layout: BucketLayout,
        params: list[nn.Parameter],
        *,
        row: int = 0,
        is_persistent: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.layout = layout
        self.row = row
        """The number of this rank's shard."""
        self.params = params
        self.dtype = params[0].dtype
        self.device = params[0].device
        self.is_trainable = params[0].requires_grad
        self.state = BucketState.SHARDED
        self.full: Tensor | None = None
        self.shard = torch.empty(0)
        self.has_shard = False
        """Whether the shard is stored; it may be empty."""
        self.storage: ShardStorage = InMemoryShard(self.shard)
        self.master = torch.empty(0)
        self.gaps: list[tuple[int, int]] = []
        """The ranges of the master that are padding, and stay zero."""
        self.states = StateStorage(self.device)
        """Where master, moments and gradients are stored, and where they are updated."""
        self.staged: Tensor | None = None
        """Where a delayed update writes, so that a running forward does not see it; None: to the shard's storage."""
        self.released_data = [nan_filled(p.shape, p.dtype, p.device) for p in params]
        self.is_persistent = is_persistent
        self.exchanges: list[Work | None] = []
        """While it is GATHERING: those that have been started, in order; None for one that needed no exchange."""
        self._holds: dict[Hold, int] = {}

    def hold(self, reason: Hold) -> None:
        """The full parameters are needed for ``reason``, until :meth:`drop`."""
        self._holds[reason] = self._holds.get(reason, 0) + 1 if reason in IS_COUNTED else 1

    def drop(self, reason: Hold) -> None:
        """End a :meth:`hold`, unless :meth:`drop_all` has ended it."""
        if (left := self._holds.get(reason, 0) - 1) > 0:
            self._holds[reason] = left
        else:
            self._holds.pop(reason, None)

    def drop_all(self, *, but_access: bool = False) -> None:
        """Nothing needs the full parameters any more: forwards and the backward have ended, or been broken off.

        ``but_access``: except blocks that read or write them, which go on.
        """
        num_blocks = self._holds.get(Hold.ACCESS, 0) if but_access else 0
        self._holds = {Hold.ACCESS: num_blocks} if num_blocks else {}

    def is_held(self, reason: Hold | None = None) -> bool:
        """Whether the full parameters are needed for ``reason``; None: for any."""
        return bool(self._holds) if reason is None else reason in self._holds

    @property
    def is_full(self) -> bool:
        """Whether parameters are views of the buffer: FULL or RESTING."""
        return self.state is BucketState.FULL or self.state is BucketState.RESTING

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's shard."""
        start, stop = self.layout.shard_range(self.row)
        return stop - start

    def shard_of(self, full: Tensor) -> Tensor:
        """This rank's shard of ``full``, which is flat."""
        start, stop = self.layout.shard_range(self.row)
        return full[start:stop]

    @property
    def buffer(self) -> Tensor:
        """:attr:`full`, which must be there."""
        assert self.full is not None, f"bucket {self.name!r} has no buffer: it is {self.state.value}"
        return self.full

    def flatten(self) -> Tensor:
        """A new flat buffer with the parameters' values; padding and released parameters are zero."""
        full = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        for param, view in zip(self.params, self.views(full), strict=True):
            if not is_released(param):
                view.copy_(param.detach())
        return full

    def views(self, full: Tensor) -> list[Tensor]:
        """``full``, which is flat and contiguous, as one view for each parameter."""
        first = full.storage_offset()
        return [full.as_strided(slot.shape, slot.strides, first + slot.offset) for slot in self.layout.slots]

    def partition(
        self,
        full: Tensor,
        stage: Stage,
        storage: ParameterStorage,
        *,
        keeps_exact_master: bool,
        keeps_exact_shard: bool,
    ) -> None:
        """Store this rank's part of the initial values ``full``, by the table above.

        Args:
            full: The full bucket; kept below stage 3.
            stage: A row of the table.
            storage: Where shards are stored.
            keeps_exact_master: Keep a master beside ``full``, whose values are quantized.
            keeps_exact_shard: Keep a trainable shard beside ``full``, which deltas are added to.
        """
        own = self.shard_of(full)
        if stage.shards_parameters:
            self.storage = storage.place(self.index, own, updates_on_host=self.states.is_on_host)
            self.shard = self.storage.shard
        else:
            self.shard = own if stage.shards_states else full
            if keeps_exact_shard and self.is_trainable:
                self.shard = own.clone()
            self.storage = InMemoryShard(self.shard, updates_on_host=self.states.is_on_host)
        self.has_shard = True
        self.start_gathering(full)
        self.expose()
        if stage.shards_parameters and not self.is_persistent:
            self.release()
        self.gaps = self.layout.gaps_of(self.row) if stage.shards_states else list(self.layout.gaps)
        initial = own if stage.shards_states else full
        dtype = master_dtype(self.dtype) if self.is_trainable else self.dtype
        is_own_master = not self.is_trainable or (self.storage.is_on_device and not self.states.is_on_host)
        if self.shard.dtype == dtype and is_own_master and not (keeps_exact_master and dtype.is_floating_point):
            self.master = self.shard
        else:
            self.master = self.states.new_master(initial, dtype)

    def update_shard(self) -> None:
        """Copy the master's values to the shard."""
        if self.master is not self.shard:
            for start, stop, values in self.states.masters(self.master, self.storage.ranges):
                self.start_update(start, stop).copy_(values)
                self.finish_update(start, stop)

    @property
    def is_its_master(self) -> bool:
        """Whether full parameters and master are the same memory, not a rounded or older copy."""
        full = self.full
        return full is not None and full.untyped_storage().data_ptr() == self.master.untyped_storage().data_ptr()

    def start_update(self, start: int, stop: int) -> Tensor:
        """Memory for new values of the shard, on the device where the master is updated; its contents are undefined."""
        if self.staged is not None:
            return self.staged[start:stop]
        return self.storage.target(start, stop, self.master.device)

    def finish_update(self, start: int, stop: int) -> None:
        """The memory that :meth:`start_update` returned is filled: pass it on to the shard's storage."""
        if self.staged is None:
            self.storage.written(start, stop)

    def write_shard(self, values: Tensor) -> None:
        """Store new values of the shard; ``values`` are where the master is updated."""
        for start, stop in self.storage.ranges:
            self.storage.target(start, stop, self.master.device).copy_(values[start:stop])
            self.storage.written(start, stop)

    def move(self, to: BucketState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise StateError(f"bucket {self.name!r} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def start_gathering(self, full: Tensor) -> None:
        """Exchanges start to fill ``full``."""
        self.full, self.exchanges = full, []  # first: an interrupt in between must not leave GATHERING without a buffer
        self.move(BucketState.GATHERING)

    def expose(self) -> None:
        """The buffer is filled: make parameters views of it."""
        self.move(BucketState.FULL)
        assert self.full is not None, f"bucket {self.name!r} is full without a buffer"
        for param, view in zip(self.params, self.views(self.full), strict=True):
            make_full(param, view)

    def num_writes(self) -> list[int]:
        """Of each parameter: see :func:`num_writes`."""
        with torch._C.DisableTorchFunctionSubclass():  # once: this runs for each gather
            return [_num_writes(param) for param in self.params]

    def moved_slots(self) -> list[int]:
        """The slots of a full bucket whose parameter was given other memory, by ``param.data = values``."""
        if not self.is_full or self.full is None:
            return []
        address, size = self.full.data_ptr(), self.full.element_size()
        each = enumerate(zip(self.layout.slots, self.params, strict=True))
        return [i for i, (at, param) in each if at.numel and param.data_ptr() != address + at.offset * size]

    def copy_back_moved(self) -> None:
        """Copy the values of :meth:`moved_slots` into the full buffer: exchanges send only what is there."""
        for slot in self.moved_slots():
            param, view = self.params[slot], self.views(self.buffer)[slot]
            view.copy_(param.detach())
            param.data = view

    def release(self) -> Tensor:
        """Release the parameters; returns their buffer."""
        self.move(BucketState.SHARDED)
        for param, empty in zip(self.params, self.released_data, strict=True):
            make_released(param, empty)
        full, self.full = self.full, None
        assert full is not None, f"bucket {self.name!r} was full without a buffer"
        return full

    def abandon(self) -> Tensor | None:
        """Give up a gather; returns the buffer, which may be reused only if all its exchanges have completed."""
        self.move(BucketState.SHARDED)
        full, self.full = self.full, None
        return full

    def own_pieces(self, stage: Stage) -> Iterator[ShardPiece]:
        """The pieces that this rank updates."""
        return self.layout.pieces(self.row if stage.shards_states else None)

    def master_pieces(self, stage: Stage) -> list[tuple[ShardPiece, Tensor]]:
        """The pieces that this rank updates, as flat views of the master without padding."""
        return [(piece, self.master[piece.start : piece.stop]) for piece in self.own_pieces(stage)]

    def own_rows(self, stage: Stage) -> Tensor:
        """The part of the full bucket whose master this rank has."""
        return self.shard_of(self.buffer) if stage.shards_states else self.buffer
