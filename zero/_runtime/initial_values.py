"""Partition the initial values: every rank takes rank 0's parameters and keeps its shard, as the stage says.

What zero.Init has sharded is sharded again, bucket by bucket: a rank holds one full bucket at a time beside the shards.
Memory may run out on one rank alone, so the ranks agree after every allocation, bucket by bucket; without that the
others would wait for it in the next broadcast: a deadlock. After a failure the parameters are full on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from zcomm import StateError, Topology, TopologyError, control
from zero._gather.gatherer import Gatherer
from zero._model.init_shards import construction_of, is_built
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket, BucketState
from zero._sharding.released import make_full


def partition_model(
    model: nn.Module, buckets: list[Bucket], topology: Topology, partition: Callable[[Bucket, Tensor], None]
) -> None:
    """Shard rank 0's values of ``model`` over the ranks. Collective.

    Args:
        model: On its device.
        buckets: Its parameters.
        topology: The ranks.
        partition: Stores this rank's part of the initial values of a bucket.

    Raises:
        Exception: What went wrong on a rank, on every rank; :func:`gather_partitioned` undoes what was done until then.
    """
    on_every_rank(lambda: _check_same_ranks(buckets, topology), topology)
    found = (construction_of(param) for bucket in buckets for param in bucket.params)
    constructions = {construction for construction in found if construction is not None}
    for buffer in model.buffers():
        _broadcast_buffer(buffer.detach(), topology)
    for bucket in buckets:
        full = on_every_rank(bucket.flatten, topology)
        if any(not is_built(param) for param in bucket.params):
            control.broadcast_(full, 0, topology)
        _copy_init_values(bucket, full)

        try:
            on_every_rank(partial(partition, bucket, full), topology)
        except Exception:  # make parameters views of ``full`` again, however far this rank came
            for param, view in zip(bucket.params, bucket.views(full), strict=True):
                make_full(param, view)
            bucket.full, bucket.state = full, BucketState.FULL
            raise
    for construction in constructions:
        construction.close_if_unused()


def _broadcast_buffer(buffer: Tensor, topology: Topology) -> None:
    dense = buffer.resolve_conj().resolve_neg().contiguous()
    control.broadcast_(dense, 0, topology)
    if dense.data_ptr() != buffer.data_ptr():
        distinct(buffer, buffer).copy_(distinct(dense, buffer))


def distinct(values: Tensor, buffer: Tensor) -> Tensor:
    """``values``, shaped as ``buffer``, once for each memory location: elements of an ``expand()`` share theirs."""
    return values[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in buffer.stride())]


def _check_same_ranks(buckets: list[Bucket], topology: Topology) -> None:
    for bucket in buckets:
        for slot, param in zip(bucket.layout.slots, bucket.params, strict=True):
            construction = construction_of(param)
            if construction is None:
                continue
            if construction.topology.global_ranks != topology.global_ranks:
                raise TopologyError(
                    "zero.Init and ZeroOptimizer must be given the same ranks: parameter "
                    f"{slot.name!r} is sharded over {construction.topology.global_ranks}, not {topology.global_ranks}"
                )
            if param.zero_shard.bucket.state is not BucketState.SHARDED:  # type: ignore[attr-defined]
                raise StateError(
                    f"parameter {slot.name!r} is in use: construct ZeroOptimizer outside of zero.Init and "
                    "zero.GatheredParameters"
                )


def _copy_init_values(bucket: Bucket, full: Tensor) -> None:
    """Read into ``full`` what zero.Init has sharded: one module at a time, and each only once."""
    built: dict[Bucket, list[int]] = {}
    for slot, param in enumerate(bucket.params):
        if is_built(param):
            built.setdefault(param.zero_shard.bucket, []).append(slot)  # type: ignore[attr-defined]
    views = bucket.views(full)
    for source, slots in built.items():
        construction = construction_of(bucket.params[slots[0]])
        assert construction is not None, "built without a construction"
        values = source.views(construction.read(source))
        for slot in slots:
            param = bucket.params[slot]
            views[slot].copy_(values[param.zero_shard.slot])  # type: ignore[attr-defined]
            construction.forget(param)


def gather_partitioned(buckets: list[Bucket], gatherer: Gatherer) -> None:
    """Gather the buckets that are partitioned and released, and leave them full. Collective."""
    for bucket in buckets:
        if bucket.state is BucketState.SHARDED and bucket.has_shard and bucket.layout.numel:
            gatherer.acquire(bucket)
