"""Filling full parameters from shards: the stage-3 gather with its secondary partition, and the gather after a step.

    acquire: SHARDED -> pool buffer -> all-gather (primary, or inside the node from the secondary partition) -> FULL
    release: FULL -> placeholders, buffer back to the pool

The order of gathers is recorded during one optimizer step; in the next, each gather issues the one that followed it.
An order that changes costs a missed prefetch, never a wrong result.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from torch import Tensor

from zcomm import SecondaryPartition, Topology, Work, all_gather_single
from zero.bucket import Bucket, BucketState
from zero.layout import BucketLayout
from zero.pool import BufferPool
from zero.settings import Effective, ZeroSettings

__all__ = ["Gatherer", "Trace", "issue_gather"]


def issue_gather(
    layout: BucketLayout, full: Tensor, shard: Tensor, topology: Topology, settings: ZeroSettings, *, format: str
) -> list[Work]:
    """Start filling ``full`` from every rank's ``shard``, at most ``allgather_bucket_size`` elements an exchange."""
    rows, works = full.view(topology.world_size, -1), []
    chunks = layout.chunks(settings.allgather_bucket_size)
    for start, stop in chunks:
        output = full if len(chunks) == 1 else rows[:, start:stop]
        work = all_gather_single(
            output,
            shard[start:stop],
            topology,
            format=format,
            numbering="local",
            async_op=settings.overlap_comm,
        )
        if work is not None:
            works.append(work)
    return works


class Trace:
    """The order in which buckets are gathered within one optimizer step, learnt in the step before."""

    def __init__(self) -> None:
        self._recorded: list[int] = []
        self._current: list[int] = []

    def follow(self, index: int) -> int | None:
        """Note that bucket ``index`` is gathered; return the one that followed last time, if the order still agrees."""
        self._current.append(index)
        at = len(self._current)
        if at < len(self._recorded) and self._recorded[at - 1] == index:
            return self._recorded[at]
        return None

    def restart(self) -> None:
        """An optimizer step ends: what was seen becomes what is expected."""
        self._recorded, self._current = self._current, []


class Gatherer:
    """Gathers and releases the buckets of stage 3. Below stage 3 every call is a no-op: buckets are always full."""

    def __init__(
        self, buckets: list[Bucket], topology: Topology, settings: ZeroSettings, effective: Effective, pool: BufferPool
    ) -> None:
        self._buckets, self._topology, self._pool = buckets, topology, pool
        self._settings, self._effective = settings, effective
        self._works: dict[int, list[Work]] = {}
        self._secondary: dict[int, SecondaryPartition] = {}
        if effective.has_secondary:
            for b in buckets:
                partition = SecondaryPartition(topology, b.layout.numel, b.dtype, device=b.device)
                self._secondary[b.index] = partition
        self.trace = Trace()
        self.checksum = 0
        """Of all gathers issued so far, in order: they match those of other ranks only if it is the same there."""
        self.by_storage: dict[int, Bucket] = {}

    def acquire(self, bucket: Bucket, *, prefetch: bool = False) -> None:
        """Make ``bucket`` FULL. ``prefetch``: the call is part of training, so its order is worth learning."""
        if bucket.state is BucketState.FULL:
            return
        self._issue(bucket)
        if prefetch and self._settings.overlap_comm:
            following = self.trace.follow(bucket.index)
            if following is not None:
                self._issue(self._buckets[following])
        for work in self._works.pop(bucket.index):
            work.wait()
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        secondary = self._secondary.get(bucket.index)
        if secondary is not None and not secondary.is_valid:
            secondary.fill(bucket.full)
        bucket.expose()
        self.by_storage[bucket.full.untyped_storage().data_ptr()] = bucket

    def _issue(self, bucket: Bucket) -> None:
        if bucket.state is not BucketState.SHARDED:
            return
        self.checksum = zlib.crc32(bucket.index.to_bytes(4, "little"), self.checksum)
        full = self._pool.take(bucket.layout.numel, bucket.dtype)
        bucket.begin_gather(full)
        secondary = self._secondary.get(bucket.index)
        if secondary is not None and secondary.is_valid:
            work = secondary.gather(full, async_op=self._settings.overlap_comm)
            self._works[bucket.index] = [] if work is None else [work]
        else:
            wire = self._effective.weight_format
            works = issue_gather(bucket.layout, full, bucket.shard, self._topology, self._settings, format=wire)
            self._works[bucket.index] = works

    def release_if_unneeded(self, bucket: Bucket) -> None:
        """Give the buffer back unless somebody needs it."""
        if bucket.state is BucketState.FULL and not bucket.is_needed and self._effective.stage.shards_parameters:
            full = bucket.release()
            del self.by_storage[full.untyped_storage().data_ptr()]
            self._pool.give(full)

    def release_all(self) -> None:
        """No forward or backward runs any more: give every buffer back, prefetched ones too."""
        if not self._effective.stage.shards_parameters:
            return
        for bucket in self._buckets:
            bucket.forward_depth, bucket.is_held_by_backward, bucket.is_pinned = 0, False, False
            if bucket.state is BucketState.GATHERING:
                self.acquire(bucket)
            self.release_if_unneeded(bucket)

    def parameters_changed(self, buckets: Iterable[Bucket]) -> None:
        """The shards of ``buckets`` have new values: replicas of the old ones are worthless."""
        for bucket in buckets:
            if bucket.index in self._secondary:
                self._secondary[bucket.index].invalidate()

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of the secondary partitions."""
        return sum(secondary.nbytes for secondary in self._secondary.values())
