"""Writes to parameters while they are full at stage 3, outside zero.GatheredParameters. They are lost on release.

    gathered --note--> counters of writes --forward, backward--> released, or a step begins: compared

A module that keeps an average of another one, or clamps its weight, in ``forward`` trains with plain torch. Here the
values would be gone after the layer, or after the step, without an error. ``param.data.mul_()`` moves no counter: with
``ZERO_DEBUG=1`` values are compared, too. Other memory with the same values (an RNN's ``flatten_parameters()``) is no
write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from zcomm import StateError
from zcomm._base import env
from zero._sharding.bucket import Bucket, has_same_bits


class LostWrites:
    """The parameters of one model that were written to while they were full."""

    def __init__(self) -> None:
        self._counters: dict[Bucket, list[int]] = {}
        self._copies: dict[Bucket, Tensor] = {}
        self._names: dict[str, None] = {}

    def note(self, bucket: Bucket) -> None:
        """``bucket`` is full: writes count from here."""
        self._counters[bucket] = bucket.num_writes()
        if env.is_set("ZERO_DEBUG") and bucket.full is not None:
            self._copies[bucket] = bucket.full.clone()

    def forget(self, bucket: Bucket, params: Collection[nn.Parameter] | None = None) -> None:
        """What was written to ``params`` (None: all) is in the shards, or was refused: writes to them count anew."""
        if (known := self._counters.get(bucket)) is None:
            return
        self.note(bucket)
        if params is not None:
            chosen, now = set(map(id, params)), self._counters[bucket]
            both = zip(bucket.params, known, now, strict=True)
            self._counters[bucket] = [new if id(param) in chosen else old for param, old, new in both]

    def find(self, bucket: Bucket) -> None:
        """Record what was written to the full ``bucket``, which is about to be released."""
        known, copy = self._counters.pop(bucket, None), self._copies.pop(bucket, None)
        if known is None or not bucket.is_full:
            return
        slots = {i for i, (old, now) in enumerate(zip(known, bucket.num_writes(), strict=True)) if old != now}
        for i in bucket.moved_slots():
            is_same = has_same_bits(bucket.params[i].detach(), bucket.views(bucket.buffer)[i])
            slots = slots - {i} if is_same else slots | {i}
        if copy is not None:
            both = zip(bucket.views(bucket.buffer), bucket.views(copy), strict=True)
            slots.update(i for i, (now, then) in enumerate(both) if not has_same_bits(now, then))
        self._names |= dict.fromkeys(bucket.layout.slots[i].name for i in sorted(slots))

    def names(self, buckets: Iterable[Bucket]) -> tuple[str, ...]:
        """The parameters, in ``buckets`` that are full now or in those released before."""
        for bucket in buckets:
            if bucket in self._counters and bucket.is_full:
                self.find(bucket)
                self.note(bucket)
        return tuple(self._names)

    def check(self, buckets: Iterable[Bucket]) -> None:
        """Raise StateError if there are any: once."""
        names = self.names(buckets)
        self._names = {}
        if names:
            raise StateError(
                f"{len(names)} parameters were written to outside zero.GatheredParameters, first {list(names[:3])}: at "
                "stage 3 the values are lost when their layer is released, or at the step. Write them inside "
                "zero.GatheredParameters([param], modifier_rank=0), in forward as well"
            )
