"""Sub-groups: runs of a bucket's master, each a few pages of a file, that are read, updated and written one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from zero._sharding.bucket import Bucket
from zero._sharding.layout import group_consecutive
from zero._storage.swap_pipeline import L, Pipeline
from zero._storage.tier_settings import StateTier

LARGEST_NUMEL = 2**22
"""Larger sub-groups need more memory and overlap no better."""


@dataclass(slots=True, eq=False)
class SubGroup:
    """Elements ``[start, stop)`` of a bucket's master."""

    bucket: Bucket
    start: int
    stop: int
    masters_at: int = 0
    """The offset of its extents in the file of masters."""
    moments_at: int = 0
    is_second: bool = False
    """Whether the second of its two extents is valid."""
    has_moments: bool = False
    """Whether its moments were ever written."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


def split(bucket: Bucket, largest: int) -> Iterator[SubGroup]:
    """``bucket`` in equal sub-groups of at most ``largest`` elements: multiples of 256, as its shard is.

    Tensors that are updated as a whole are not cut: as many as fit, but at least one, are a sub-group.
    """
    numel = bucket.shard_numel
    if any(slot.is_whole for slot in bucket.layout.slots):
        starts = [piece.start for piece in bucket.layout.tensors(bucket.row) if piece.start % 256 == 0]
        numels = [stop - start for start, stop in pairwise([*starts, numel])]
        for run in group_consecutive(numels, largest):
            yield SubGroup(bucket, starts[run[0]], starts[run[0]] + sum(numels[index] for index in run))
        return
    blocks = -(-numel // 256)
    parts = -(-blocks // max(min(largest, LARGEST_NUMEL) // 256, 1)) or 1
    step = max(-(-blocks // parts), 1) * 256
    for start in range(0, numel, step):
        yield SubGroup(bucket, start, min(start + step, numel))


def new_pipeline(read: Callable[[SubGroup], L], tier: StateTier) -> Pipeline[SubGroup, L]:
    """Reads with ``read``, updates and writes sub-groups as ``tier`` says."""
    return Pipeline(read, num_buffers=tier.num_buffers, reads_ahead=tier.reads_ahead, writes_behind=tier.writes_behind)
