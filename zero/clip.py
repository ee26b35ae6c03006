"""The global gradient norm over shards: summed in float64, rounded once, the same bits on every rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zcomm import ConfigError, StateError, control
from zero.bucket import Bucket
from zero.model_parallel import ModelParallel
from zero.runtime import Runtime

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    runtime: Runtime, model: ModelParallel, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """See :meth:`zero.ZeroOptimizer.clip_grad_norm_`."""
    if norm_type not in (2.0, math.inf):
        raise ConfigError(f"norm_type must be 2 or inf: norm_type={norm_type}")
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be at least 0: max_norm={max_norm}")
    runtime.reducer.flush()
    parts = [part for bucket in runtime.buckets for part in _own_parts(runtime, model, bucket)]
    if norm_type == math.inf:
        largest = [part.abs().amax().to(torch.float64) for part in parts]  # amax, unlike max(), keeps a NaN
        mine = torch.stack(largest).amax() if largest else torch.zeros((), dtype=torch.float64)
    else:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        squares = [norm**2 for norm in (torch.stack(norms).tolist() if norms else [])]  # one host sync
        mine = torch.tensor(sum(squares), dtype=torch.float64)
    by_rank = control.gather_float64(mine.reshape(1).cpu(), runtime.topology).flatten()
    if norm_type == math.inf:
        largest_of = torch.tensor(model.gather(by_rank.amax().item()), dtype=torch.float64)
        total = largest_of.amax().item()  # keeps a NaN
    else:
        total = math.sqrt(sum(model.gather(sum(by_rank.tolist()))))
    if error_if_nonfinite and not math.isfinite(total):
        raise StateError(f"the global gradient norm is {total}; pass error_if_nonfinite=False to go on")
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in runtime.reducer.all) else torch.float32
    norm = torch.tensor(total, dtype=dtype)
    if max_norm == math.inf:
        return norm
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grads in runtime.reducer.all:
        result = runtime.reducer.results(grads)
        if result is not None:
            result.mul_(coefficient.to(result.dtype))
    return norm


def _own_parts(runtime: Runtime, model: ModelParallel, bucket: Bucket) -> list[Tensor]:
    """This rank's shard of the gradient, parameter by parameter; of replicated ones on one model-parallel rank."""
    grads = runtime.reducer.by_bucket.get(bucket.index)
    if grads is None or runtime.reducer.results(grads) is None or grads.result is None:
        return []
    row = runtime.topology.shard_index("local")
    base = row * bucket.layout.shard_numel
    pieces = [piece for piece in bucket.layout.pieces(row) if model.counts(bucket.params[piece.slot])]
    return [grads.result[piece.start - base : piece.stop - base] for piece in pieces]
