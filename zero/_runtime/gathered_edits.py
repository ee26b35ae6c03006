"""Values that a rank gives parameters while they are whole: every rank takes them over, and so do the masters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from zcomm import Topology, control
from zero._sharding.bucket import Bucket, num_writes
from zero._sharding.stages import Stage

Slots = Mapping[Bucket, Collection[int]]


class Publish(Protocol):
    """:meth:`zero._runtime.write_back.Publisher.publish`, as far as it is of use here."""

    def __call__(self, buckets: list[Bucket], *, params: Collection[nn.Parameter] | None) -> None:
        """Bring what the forward reads in line with the masters; ``params`` have new values."""


class Edits:
    """Of the parameters of one model.

    Args:
        stage: Whose layout shards have.
        topology: The ranks.
        open_masters: Holds the masters of buckets in memory, to be changed.
        publish: Called when they have been.
    """

    def __init__(
        self,
        stage: Stage,
        topology: Topology,
        open_masters: Callable[[list[Bucket]], AbstractContextManager[None]],
        publish: Publish,
    ) -> None:
        self._stage, self._topology, self._open_masters, self._publish = stage, topology, open_masters, publish

    @contextmanager
    def modified(self, slots: Slots, rank: int) -> Iterator[None]:
        """What ``rank`` changes inside, in these parameters of full buckets, is taken over by every rank.

        Elements that it leaves as they are keep their masters, of which the forward sees only a rounding.
        """
        row = self._topology.shard_index("local")
        before = {bucket: bucket.own_rows(self._stage, row).clone() for bucket in slots}
        params = _params(slots)
        writes = [num_writes(param) for param in params]
        try:
            yield
        finally:
            for bucket in slots:
                bucket.take_back()
            is_written = [num_writes(param) != old for param, old in zip(params, writes, strict=True)]
            self._take_over(slots, rank, before, is_written)

    def take_values(self, slots: Slots, rank: int) -> None:
        """Take over ``rank``'s values of these parameters of full buckets."""
        self._take_over(slots, rank, {}, [True] * len(_params(slots)))

    def _take_over(self, slots: Slots, rank: int, before: Mapping[Bucket, Tensor], is_written: Sequence[bool]) -> None:
        """``before``: the values of this rank's rows; where they are as they were, masters stay.

        ``is_written``: which parameters have been written to, whatever the values are. What autograd has saved of a
        parameter that is written to or changed on any rank is out of date on all.
        """
        flags = []
        for bucket, chosen in slots.items():
            flags += self._take_bucket(bucket, chosen, rank, before.get(bucket))
        changed = torch.tensor([a or b for a, b in zip(flags, is_written, strict=True)], dtype=torch.int64)
        if self._topology.world_size > 1:
            changed = control.agree_max(changed, self._topology)
        is_new = changed.bool().tolist()
        self._publish(list(slots), params=[p for p, new in zip(_params(slots), is_new, strict=True) if new])

    def _take_bucket(self, bucket: Bucket, chosen: Collection[int], rank: int, before: Tensor | None) -> list[bool]:
        """Which of ``chosen`` differ from ``before`` in this rank's rows."""
        changed = dict.fromkeys(chosen, False)
        with self._open_masters([bucket]):
            assert bucket.full is not None, "values can only be taken from full parameters"
            control.broadcast_(bucket.full, rank, self._topology)
            row = self._topology.shard_index("local")
            rows = bucket.own_rows(self._stage, row)
            base = row * rows.numel() if self._stage.shards_states else 0
            for piece, master in bucket.master_pieces(self._stage, row):
                if piece.slot in changed:
                    part = slice(piece.start - base, piece.stop - base)
                    values = rows[part].to(master.dtype)
                    if before is not None:
                        is_same = rows[part] == before[part]
                        values = torch.where(is_same, master, values)
                        changed[piece.slot] |= not bool(is_same.all())
                    master.copy_(values)
        return list(changed.values())


def _params(slots: Slots) -> list[nn.Parameter]:
    return [bucket.params[slot] for bucket, chosen in slots.items() for slot in dict.fromkeys(chosen)]
