"""Edits of full parameters inside ``zero.GatheredParameters``: one rank's values go to all ranks and the masters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zcomm import StateError, control
from zero._runtime.write_back import WriteBack
from zero._sharding.bucket import Bucket, num_writes

Slots = Mapping[Bucket, Collection[int]]


@dataclass
class _EditBlock:
    slots: Slots
    rank: int
    """Its values count."""
    before: dict[Bucket, Tensor] = field(default_factory=dict)
    """The values of this rank's rows when it began."""
    writes: list[int] = field(default_factory=list)
    """How often each of its parameters had been written to by then."""


class GatheredEdits:
    """Applies edits of the parameters of one model.

    Args:
        write_back: Writes back after masters have changed.
        open_masters: A context in which the masters of buckets are in memory and may be changed.
    """

    def __init__(
        self, write_back: WriteBack, open_masters: Callable[[list[Bucket]], AbstractContextManager[None]]
    ) -> None:
        self._stage, self._topology = write_back.stage, write_back.topology
        self._open_masters, self._write_back = open_masters, write_back
        self._blocks: list[_EditBlock] = []
        """The open blocks, the innermost last."""
        self._loaded: set[nn.Parameter] = set()

    def may_edit(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a rank may change ``params`` alone: at the end of open blocks all ranks adopt one rank's values."""
        editable = {param for block in self._blocks for param in _params(block.slots)}
        return bool(editable) and editable >= set(params)

    @property
    def counts_here(self) -> bool:
        """Whether the values of this rank count in the innermost block."""
        return self._blocks[-1].rank == self._topology.rank

    def note_loaded(self, params: Iterable[nn.Parameter]) -> None:
        """The masters of ``params`` get the values that they have at the end of the block, also where they are equal to
        what the forward has read: a load is no edit.
        """
        self._loaded.update(params)

    @property
    def is_open(self) -> bool:
        """Whether a block is open in which a rank may change parameters."""
        return bool(self._blocks)

    @contextmanager
    def modified(self, slots: Slots, rank: int) -> Iterator[None]:
        """Every rank adopts what ``rank`` changes inside, in these parameters of full buckets.

        Elements that it leaves as they are keep their masters, which are more precise than what the forward sees.

        Raises:
            StateError: A block around it, in which another rank's values count, has parameters of the same buckets.
        """
        around = [block for block in self._blocks if not slots.keys().isdisjoint(block.slots)]
        others = [block.rank for block in around if block.rank != rank]
        if others:
            raise StateError(
                f"zero.GatheredParameters(modifier_rank={rank}) would overwrite the edits of the block around it, of "
                f"modifier_rank={others[-1]}: end that block first"
            )
        block = _EditBlock(slots, rank)
        self._begin(block)
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.pop()
            self._end(block)

    def adopt_so_far(self) -> None:
        """Adopt what open blocks have changed so far: what follows may write masters back. Collective."""
        for block in self._blocks:
            self._end(block)
            self._begin(block)

    def _begin(self, block: _EditBlock) -> None:
        block.before = {bucket: bucket.own_rows(self._stage).clone() for bucket in block.slots}
        block.writes = [num_writes(param) for param in _params(block.slots)]

    def _end(self, block: _EditBlock) -> None:
        params = _params(block.slots)
        for bucket in block.slots:
            bucket.copy_back_moved()
        is_written = [num_writes(param) != old for param, old in zip(params, block.writes, strict=True)]
        loaded = torch.tensor([param in self._loaded for param in params], dtype=torch.int64)
        self._loaded.difference_update(params)
        if self._topology.world_size > 1:
            control.broadcast_(loaded, block.rank, self._topology)
        self._adopt(block.slots, block.rank, block.before, is_written, loaded.bool().tolist())

    def adopt_values(self, slots: Slots, rank: int) -> None:
        """Adopt ``rank``'s values of these parameters of full buckets, on every rank and in the masters."""
        of_all = [True] * len(_params(slots))
        self._adopt(slots, rank, {}, of_all, of_all)

    def _adopt(
        self,
        slots: Slots,
        rank: int,
        before: Mapping[Bucket, Tensor],
        is_written: Sequence[bool],
        is_loaded: Sequence[bool],
    ) -> None:
        """Adopt ``rank``'s values, and agree on which parameters have changed.

        Args:
            slots: The parameters.
            rank: Its values count.
            before: The earlier values of this rank's rows, unless all are loaded; where they are equal, masters stay.
            is_written: Which parameters were written to, whatever the values. What autograd has saved of a parameter
                that any rank wrote to or changed is out of date on all.
            is_loaded: Those whose masters get the values everywhere.
        """
        flags, loaded = [], {param for param, one in zip(_params(slots), is_loaded, strict=True) if one}
        for bucket, chosen in slots.items():
            edited = {slot for slot in chosen if bucket.params[slot] not in loaded}
            flags += self._adopt_bucket(bucket, chosen, edited, rank, before)
        changed = torch.tensor([a or b for a, b in zip(flags, is_written, strict=True)], dtype=torch.int64)
        if self._topology.world_size > 1:
            changed = control.agree_max(changed, self._topology)
        is_new = changed.bool().tolist()
        self._write_back.run(list(slots), params=[p for p, new in zip(_params(slots), is_new, strict=True) if new])

    def _adopt_bucket(
        self,
        bucket: Bucket,
        chosen: Collection[int],
        edited: Collection[int],
        rank: int,
        before: Mapping[Bucket, Tensor],
    ) -> list[bool]:
        """Broadcast one bucket and update its masters; which of ``chosen`` changed in this rank's rows."""
        changed = dict.fromkeys(chosen, False)
        with self._open_masters([bucket]):
            control.broadcast_(bucket.buffer, rank, self._topology)
            rows = bucket.own_rows(self._stage)
            for piece, master in bucket.master_pieces(self._stage):
                if piece.slot in changed:
                    part = slice(piece.start, piece.stop)
                    values = rows[part].to(master.device, master.dtype)  # masters may be in host memory
                    if piece.slot in edited:
                        is_same = (rows[part] == before[bucket][part]).to(master.device)
                        values = torch.where(is_same, master, values)
                        changed[piece.slot] |= not bool(is_same.all())
                    master.copy_(values)
        return list(changed.values())


def _params(slots: Slots) -> list[nn.Parameter]:
    return [bucket.params[slot] for bucket, chosen in slots.items() for slot in dict.fromkeys(chosen)]
