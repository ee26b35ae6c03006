"""One optimizer step on master pieces in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from zero._optim.cpu_optimizer_base import CPUOptimizer
from zero._optim.masters import MasterPiece
from zero._sharding.bucket import Bucket


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

    zero's own optimizers multiply the gradient by ``factor`` and write the new parameters in the same pass. Others take
    the gradient as it is, and the caller updates the shards of their buckets afterwards.

    ``groups``: what :func:`numbers_of_groups` returns, if it is known.
    """
    index_of = numbers_of_groups(inner) if groups is None else groups
    if isinstance(inner, CPUOptimizer):
        _step_in_one_pass(inner, pieces, factor, index_of)
        return
    leaves: dict[int, list[Tensor]] = defaultdict(list)
    for piece in pieces:
        leaves[index_of[id(piece.master)]].append(piece.master)
        if piece.master.grad is not None:
            piece.master.grad = piece.master.grad.to(piece.master.dtype)
    step_leaves(inner, leaves)


def _step_in_one_pass(
    inner: CPUOptimizer, pieces: Sequence[MasterPiece], factor: float, index_of: Mapping[int, int]
) -> None:
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
            out = None if shard is None else shard[piece.start : piece.start + master.numel()]
            if grad is not None:
                group = inner.param_groups[index_of[id(master)]]
                inner.step_tensor_(master, grad, group, grad_factor=factor, out=out)
            elif out is not None:
                out.copy_(master)
        if shard is not None:
            bucket.finish_update(0, bucket.master.numel())
