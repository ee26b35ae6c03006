"""One optimizer step on master pieces in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from zero._optim.cpu_optimizer_base import CPUOptimizer
from zero._optim.masters import MasterPiece
from zero._optim.several import optimizers_of, owners_of_groups
from zero._sharding.bucket import Bucket


def folds(inner: Optimizer) -> bool:
    """Whether :func:`step_pieces` multiplies gradients and writes shards: ``inner`` is, or has, one of zero's own."""
    return any(isinstance(one, CPUOptimizer) for one in optimizers_of(inner))


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
    owners = owners_of_groups(inner)
    leaves: dict[int, list[Tensor]] = defaultdict(list)
    for piece in pieces:
        master, group = piece.master, index_of[id(piece.master)]
        if not isinstance(owners[group], CPUOptimizer):
            leaves[group].append(master)
            if master.grad is not None:
                master.grad = widened(master.grad, master, factor if folds(inner) else 1.0)
    if not isinstance(inner, CPUOptimizer):
        step_leaves(inner, leaves)
    if folds(inner):
        _step_in_one_pass(inner, pieces, factor, index_of)


def widened(grad: Tensor, master: Tensor, factor: float) -> Tensor:
    """``grad`` times ``factor`` in the dtype of ``master``; ``grad`` itself if that changes nothing."""
    wide = grad.to(master.dtype)
    return wide if factor == 1 else wide * factor


def _step_in_one_pass(
    inner: Optimizer, pieces: Sequence[MasterPiece], factor: float, index_of: Mapping[int, int]
) -> None:
    """Step the pieces of zero's own optimizers, and write the new parameters of all."""
    owners = owners_of_groups(inner)
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
            master, grad = piece.master, piece.master.grad
            out = None if shard is None else piece.of(shard)
            group = index_of[id(master)]
            if grad is not None and isinstance(own := owners[group], CPUOptimizer):
                own.step_tensor_(master, grad, inner.param_groups[group], grad_factor=factor, out=out)
            elif out is not None:
                out.copy_(master)
        if shard is not None:
            bucket.finish_update(0, bucket.master.numel())
