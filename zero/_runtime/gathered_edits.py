"""Edits of full parameters inside ``zero.GatheredParameters``: one rank's values go to all ranks and the masters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from zcomm import control
from zero._runtime.write_back import WriteBack
from zero._sharding.bucket import Bucket, num_writes

Slots = Mapping[Bucket, Collection[int]]


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
        self._editable: list[nn.Parameter] = []

    def may_edit(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a rank may change ``params`` alone: at the end of blocks around it all ranks adopt its values."""
        given = set(params)
        return bool(given) and given <= set(self._editable)

    @contextmanager
    def modified(self, slots: Slots, rank: int) -> Iterator[None]:
        """Every rank adopts what ``rank`` changes inside, in these parameters of full buckets.

        Elements that it leaves as they are keep their masters, which are more precise than what the forward sees.
        """
        before = {bucket: bucket.own_rows(self._stage).clone() for bucket in slots}
        params = _params(slots)
        writes = [num_writes(param) for param in params]
        self._editable += params
        try:
            yield
        finally:
            del self._editable[len(self._editable) - len(params) :]
            for bucket in slots:
                bucket.copy_back_moved()
            is_written = [num_writes(param) != old for param, old in zip(params, writes, strict=True)]
            self._adopt(slots, rank, before, is_written)

    def adopt_values(self, slots: Slots, rank: int) -> None:
        """Adopt ``rank``'s values of these parameters of full buckets, on every rank and in the masters."""
        self._adopt(slots, rank, {}, [True] * len(_params(slots)))

    def _adopt(self, slots: Slots, rank: int, before: Mapping[Bucket, Tensor], is_written: Sequence[bool]) -> None:
        """Adopt ``rank``'s values, and agree on which parameters have changed.

        Args:
            slots: The parameters.
            rank: Its values count.
            before: The earlier values of this rank's rows; where they are equal, masters stay.
            is_written: Which parameters were written to, whatever the values. What autograd has saved of a parameter
                that any rank wrote to or changed is out of date on all.
        """
        flags = []
        for bucket, chosen in slots.items():
            flags += self._adopt_bucket(bucket, chosen, rank, before.get(bucket))
        changed = torch.tensor([a or b for a, b in zip(flags, is_written, strict=True)], dtype=torch.int64)
        if self._topology.world_size > 1:
            changed = control.agree_max(changed, self._topology)
        is_new = changed.bool().tolist()
        self._write_back.run(list(slots), params=[p for p, new in zip(_params(slots), is_new, strict=True) if new])

    def _adopt_bucket(self, bucket: Bucket, chosen: Collection[int], rank: int, before: Tensor | None) -> list[bool]:
        """Broadcast one bucket and update its masters; which of ``chosen`` changed in this rank's rows."""
        changed = dict.fromkeys(chosen, False)
        with self._open_masters([bucket]):
            control.broadcast_(bucket.buffer, rank, self._topology)
            rows = bucket.own_rows(self._stage)
            for piece, master in bucket.master_pieces(self._stage):
                if piece.slot in changed:
                    part = slice(piece.start, piece.stop)
                    values = rows[part].to(master.device, master.dtype)  # masters may be in host memory
                    if before is not None:
                        is_same = (rows[part] == before[part]).to(master.device)
                        values = torch.where(is_same, master, values)
                        changed[piece.slot] |= not bool(is_same.all())
                    master.copy_(values)
        return list(changed.values())


def _params(slots: Slots) -> list[nn.Parameter]:
    return [bucket.params[slot] for bucket, chosen in slots.items() for slot in dict.fromkeys(chosen)]
