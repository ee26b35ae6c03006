"""One optimizer step on master pieces in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from zero._optim.masters import MasterPiece
from zero._optim.several import optimizers_of
from zero._optim.updaters import Updater, updater_of, updaters_of_groups
from zero._sharding.bucket import Bucket


def folds(inner: Optimizer) -> bool:
    """Whether :func:`step_pieces` multiplies gradients and writes shards: ``inner`` is, or has, one of zero's own."""
    return any(updater_of(one).is_fused for one in optimizers_of(inner))


def numbers_of_groups(inner: Optimizer) -> dict[int, int]:
    """The group index of each parameter of ``inner``, by the parameter's id."""
    return {id(p): i for i, group in enumerate(inner.param_groups) for p in group["params"]}


def step_leaves(inner: Optimizer, leaves: Mapping[int, list[Tensor]]) -> None:
    """Step these parameters, by group index, and no others of ``inner``."""
    before = [group["params"] for group in inner.param_groups]
    for index, group in enumerate(inner.param_groups):
        group["params"] = leaves.get(index, [])
    try:
        inner.step()
    finally:
        for group, params in zip(inner.param_groups, before, strict=True):
            group["params"] = params


def step_pieces(
    inner: Optimizer, pieces: Sequence[MasterPiece], factor: float, groups: Mapping[int, int] | None = None
) -> None:
    """Step every piece that has a gradient, and no other parameter of ``inner``.

    If ``inner`` :func:`folds`, gradients are multiplied by ``factor`` and the new parameters are written: by zero's own
    optimizers in the same pass, for others beside them before and after their step. If not, gradients are taken as
    they are, and the caller updates the shards of their buckets afterwards.

    ``groups``: what :func:`numbers_of_groups` returns, if it is known.
    """
    index_of = numbers_of_groups(inner) if groups is None else groups
    updaters, is_folding = updaters_of_groups(inner), folds(inner)
    leaves: dict[int, list[Tensor]] = defaultdict(list)
    for piece in pieces:
        group = index_of[id(piece.master)]
        leaves[group] += updaters[group].prepare(piece.master, piece.master.grad, factor if is_folding else 1.0)
    if not updater_of(inner).is_fused:
        step_leaves(inner, leaves)
    if is_folding:
        _finish_pieces(inner, updaters, pieces, factor, index_of)


def _finish_pieces(
    inner: Optimizer,
    updaters: Sequence[Updater],
    pieces: Sequence[MasterPiece],
    factor: float,
    index_of: Mapping[int, int],
) -> None:
    """Step what is left, and write the new parameters of all."""
    by_bucket: dict[Bucket, list[MasterPiece]] = defaultdict(list)
    for piece in pieces:
        by_bucket[piece.bucket].append(piece)
    for bucket, of_bucket in by_bucket.items():
        shard: Tensor | None = None
        if bucket.master is not bucket.shard:
            shard = bucket.start_update(0, bucket.master.numel())
            for start, stop in bucket.gaps:
                shard[start:stop].zero_()
        for piece in of_bucket:
            master, out = piece.master, None if shard is None else piece.of(shard)
            group = index_of[id(master)]
            updaters[group].finish(master, master.grad, inner.param_groups[group], factor=factor, out=out)
        if shard is not None:
            bucket.finish_update(0, bucket.master.numel())
