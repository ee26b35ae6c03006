"""Optimizer state offload: which buckets' masters and moments are on the device, in host memory, or in files."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from zcomm import Topology
from zero._config.settings import ZeroSettings
from zero._optim.cpu_optimizer import CPUOptimizer
from zero._optim.host_adam import describe_update
from zero._optim.state_files import StateFiles
from zero._sharding.bucket import Bucket
from zero._sharding.stages import get_stage
from zero._storage.host_memory import HostMemory
from zero._storage.tier_settings import StateTier, Tier


def assign_states(buckets: list[Bucket], settings: ZeroSettings, topology: Topology) -> StateFiles | None:
    """Assign host memory to the buckets whose states are offloaded, and create their files. Collective.

    ``ratio`` is met as closely as undivided buckets allow. The buckets used last in the forward are offloaded first:
    their gradients come first in the backward, so their copies overlap most of it.
    """
    tiers = settings.tiers
    if tiers.states.tier is Tier.DEVICE or not get_stage(settings.stage).shards_states:
        return None
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    wanted = tiers.states.ratio * sum(bucket.layout.numel for bucket in trainable)
    host, offloaded = HostMemory(buckets[0].device, pins=tiers.pins_memory), 0
    for bucket in reversed(trainable):
        if offloaded + bucket.layout.numel / 2 <= wanted:
            bucket.host = host
            offloaded += bucket.layout.numel
    chosen = [bucket for bucket in trainable if bucket.host is not None]
    return StateFiles(chosen, tiers, topology) if chosen and tiers.states.tier is Tier.NVME else None


def describe_states(buckets: list[Bucket], tier: StateTier, inner: Optimizer) -> tuple[str, ...]:
    """Where masters and moments are stored, and what updates them, for ``optimizer.effective``; alike on all ranks."""
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    offloaded = sum(bucket.layout.numel for bucket in trainable if bucket.host is not None)
    is_narrow = isinstance(inner, CPUOptimizer) and inner.moment_dtype == torch.bfloat16
    formats = ("moments are stored in bfloat16, rounded stochastically",) if is_narrow else ()
    if not offloaded:
        return formats
    share = offloaded / sum(bucket.layout.numel for bucket in trainable)
    place = f"files below {tier.path}" if tier.tier is Tier.NVME else "host memory"
    update = describe_update(inner)
    part = "" if share == 1 else f"{share:.0%} of the "
    delay = f", during the next step after the first {tier.delay_start}" if tier.delays_update else ""
    return (f"{part}masters and moments are stored in {place}, updated on the host by {update}{delay}", *formats)
