"""Which buckets' states rest where."""

from __future__ import annotations

from zero.bucket import Bucket
from zero.settings import ZeroSettings
from zero.stages import get_stage
from zero.tiers.host import HostMemory
from zero.tiers.settings import Tier

__all__ = ["assign_states"]


def assign_states(buckets: list[Bucket], settings: ZeroSettings) -> None:
    """Give the buckets whose masters and moments are offloaded their host memory.

    ``ratio`` is met as nearly as whole buckets allow: those that are used last in the forward, whose gradients come
    first in the backward, go first.
    """
    tiers = settings.tiers
    if tiers.states.tier is Tier.DEVICE or not get_stage(settings.stage).shards_states:
        return
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    wanted = tiers.states.ratio * sum(bucket.layout.numel for bucket in trainable)
    host, offloaded = HostMemory(buckets[0].device, pins=tiers.pins_memory), 0
    for bucket in reversed(trainable):
        if offloaded + bucket.layout.numel / 2 <= wanted:
            bucket.host = host
            offloaded += bucket.layout.numel
