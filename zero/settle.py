"""The first values: every rank takes rank 0's, and keeps what its stage says.

Memory may run out on one rank alone, so whatever allocates is agreed on, bucket by bucket. After a failure the
parameters are whole on every rank.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from zcomm import Topology, control
from zero.agreement import on_every_rank
from zero.bucket import Bucket, BucketState
from zero.gather import Gatherer
from zero.released import show
from zero.stages import Stage

__all__ = ["make_whole", "settle"]


def settle(
    model: nn.Module, buckets: list[Bucket], stage: Stage, topology: Topology, *, keeps_exact_masters: bool
) -> None:
    """Divide the values of ``model`` over the ranks, as they are on rank 0. Collective.

    Raises:
        Exception: What went wrong on a rank, on every rank; :func:`make_whole` undoes what was done until then.
    """
    for buffer in model.buffers():
        control.broadcast_(buffer, 0, topology)
    for bucket in buckets:
        full = on_every_rank(bucket.flatten, topology)
        control.broadcast_(full, 0, topology)
        try:
            on_every_rank(
                partial(bucket.settle, full, stage, topology, keeps_exact_master=keeps_exact_masters), topology
            )
        except Exception:
            _expose(bucket, full)
            raise


def _expose(bucket: Bucket, full: Tensor) -> None:
    """Parameters are views of ``full``, however far this rank came."""
    for param, view in zip(bucket.params, bucket.views(full), strict=True):
        show(param, view)
    bucket.full, bucket.state = full, BucketState.FULL


def make_whole(buckets: list[Bucket], gatherer: Gatherer) -> None:
    """Gather the buckets that are settled and released, and leave them so. Collective."""
    for bucket in buckets:
        if bucket.state is BucketState.SHARDED and bucket.shard.numel():
            gatherer.acquire(bucket)
