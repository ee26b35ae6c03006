"""Writes to parameters while they are gathered at stage 3, outside zero.GatheredParameters: releasing them loses those.

    gathered --note--> counters of writes --forward, backward--> released, or a step begins: compared

A module that keeps an average of another one, or clamps its weight, in ``forward`` trains with plain torch. Here the
values would be gone after the layer, without an error. ``param.data.mul_()`` moves no counter: with ``ZERO_DEBUG=1``
values are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zcomm import StateError
from zcomm._base import env
from zero._sharding.bucket import Bucket, has_same_bits


class LostWrites:
    """The parameters of one model that were written to while they were gathered."""

    def __init__(self) -> None:
        self._counters: dict[Bucket, list[int]] = {}
        self._copies: dict[Bucket, Tensor] = {}
        self._names: dict[str, None] = {}

    def note(self, bucket: Bucket) -> None:
        """``bucket`` was gathered: writes count from here."""
        self._counters[bucket] = bucket.num_writes()
        if env.is_set("ZERO_DEBUG") and bucket.full is not None:
            self._copies[bucket] = bucket.full.clone()

    def forget(self, bucket: Bucket) -> None:
        """What was written to ``bucket`` is in its shards, or was refused: writes count from here."""
        if bucket in self._counters:
            self.note(bucket)

    def find(self, bucket: Bucket) -> None:
        """Record what was written to the full ``bucket``, which is about to be released."""
        known, copy = self._counters.pop(bucket, None), self._copies.pop(bucket, None)
        if known is None:
            return
        slots = {i for i, (old, now) in enumerate(zip(known, bucket.num_writes(), strict=True)) if old != now}
        slots.update(bucket.moved_slots())
        if copy is not None:
            both = zip(bucket.views(bucket.buffer), bucket.views(copy), strict=True)
            slots.update(i for i, (now, then) in enumerate(both) if not has_same_bits(now, then))
        self._names |= dict.fromkeys(bucket.layout.slots[i].name for i in sorted(slots))

    def check(self, buckets: Iterable[Bucket]) -> None:
        """Raise StateError if there were any, in ``buckets`` that are full now or in those released before."""
        for bucket in buckets:
            if bucket in self._counters and bucket.is_full:
                self.find(bucket)
                self.note(bucket)
        if self._names:
            names, self._names = list(self._names), {}
            raise StateError(
                f"{len(names)} parameters were written to outside zero.GatheredParameters, first {names[:3]}: at stage "
                "3 the values are lost when their layer is released. Write them inside "
                "zero.GatheredParameters([param], modifier_rank=0), in forward as well"
            )
