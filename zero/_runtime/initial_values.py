"""The first values: every rank takes rank 0's, and keeps what its stage says.

What zero.Init has divided is divided anew, bucket by bucket: a rank holds one of them whole, beside the shards.
Memory may run out on one rank alone, so whatever allocates is agreed on, bucket by bucket. After a failure the
parameters are whole on every rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from zcomm import StateError, Topology, TopologyError, control
from zero._gather.gatherer import Gatherer
from zero._model.init_shards import construction_of, is_built
from zero._optim.state_files import StateFiles
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket, BucketState
from zero._sharding.released import show
from zero._sharding.stages import Stage
from zero._storage.parameter_storage import ParameterRests


def settle(
    model: nn.Module,
    buckets: list[Bucket],
    stage: Stage,
    topology: Topology,
    rests: tuple[ParameterRests, StateFiles | None],
    *,
    keeps_exact_masters: bool,
    keeps_exact_shards: bool,
) -> None:
    """Divide the values of ``model`` over the ranks, as they are on rank 0. Collective.

    Args:
        model: On its device.
        buckets: Its parameters.
        stage: What is kept of them.
        topology: The ranks.
        rests: Where parameters and states rest.
        keeps_exact_masters: Beside full parameters, which are quantized.
        keeps_exact_shards: Beside full parameters, which changes are added to.

    Raises:
        Exception: What went wrong on a rank, on every rank; :func:`make_whole` undoes what was done until then.
    """
    on_every_rank(lambda: _check_same_ranks(buckets, topology), topology)
    constructions = {construction_of(param) for bucket in buckets for param in bucket.params} - {None}
    for buffer in model.buffers():
        _take_first_ranks(buffer.detach(), topology)
    for bucket in buckets:
        full = on_every_rank(bucket.flatten, topology)
        if any(not is_built(param) for param in bucket.params):
            control.broadcast_(full, 0, topology)
        _take_over(bucket, full)

        def take(bucket: Bucket = bucket, full: Tensor = full) -> None:
            parameters, states = rests
            bucket.settle(
                full,
                stage,
                topology,
                parameters,
                keeps_exact_master=keeps_exact_masters,
                keeps_exact_shard=keeps_exact_shards,
            )
            if states is not None and bucket in states.groups_of:
                states.settle(bucket)

        try:
            on_every_rank(take, topology)
        except Exception:
            _expose(bucket, full)
            raise
    for construction in constructions:
        if construction is not None:
            construction.close_if_unused()


def _take_first_ranks(buffer: Tensor, topology: Topology) -> None:
    whole = buffer.resolve_conj().resolve_neg().contiguous()
    control.broadcast_(whole, 0, topology)
    if whole.data_ptr() != buffer.data_ptr():
        distinct(buffer, buffer).copy_(distinct(whole, buffer))


def distinct(values: Tensor, buffer: Tensor) -> Tensor:
    """``values``, in the shape of ``buffer``, once for each of its places in memory, which ``expand()`` lets share."""
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
                    f"{slot.name!r} is divided over {construction.topology.global_ranks}, not {topology.global_ranks}"
                )
            if param.zero_shard.bucket.state is not BucketState.SHARDED:  # type: ignore[attr-defined]
                raise StateError(
                    f"parameter {slot.name!r} is in use: construct ZeroOptimizer outside of zero.Init and "
                    "zero.GatheredParameters"
                )


def _take_over(bucket: Bucket, full: Tensor) -> None:
    """Read into ``full`` what zero.Init has divided: one module at a time, and each only once."""
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
