"""Gradient clipping: the global norm over shards, summed in float64, rounded once, the same bits on every rank.

The norm and the clipping coefficient stay on the gradients' device: on a GPU the host waits for neither.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from zcomm import ConfigError, StateError, control
from zero._ranks.model_parallel import ModelParallel
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket
from zero._step.final_gradients import FinalGradients


def clip_grad_norm_(
    gradients: FinalGradients, model: ModelParallel, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    """See :meth:`zero.ZeroOptimizer.clip_grad_norm_`."""
    if norm_type not in (2.0, math.inf):
        raise ConfigError(f"norm_type must be 2 or inf: norm_type={norm_type}")
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be at least 0: max_norm={max_norm}")
    norm = global_norm(gradients, model, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):  # the host waits
        raise StateError(f"the global gradient norm is {norm.item()}; pass error_if_nonfinite=False to go on")
    _fold(gradients, norm, max_norm)
    gradients.apply()
    return norm


def fold_clipping(gradients: FinalGradients, model: ModelParallel, max_norm: float) -> Tensor:
    """Clip by changing the factor of ``gradients``, not yet applied; returns the 2-norm before. Collective."""
    norm = global_norm(gradients, model, 2.0)
    _fold(gradients, norm, max_norm)
    return norm


def _fold(gradients: FinalGradients, norm: Tensor, max_norm: float) -> None:
    if max_norm != math.inf:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        gradients.factor = gradients.factor.times_coefficient(coefficient)


def global_norm(gradients: FinalGradients, model: ModelParallel, norm_type: float) -> Tensor:
    """The norm of the gradients over all ranks, groups and parameters, a scalar on their device. Collective."""
    runtime = gradients.runtime
    runtime.reducer.flush()
    mine = partial(_norm_here, runtime, model, norm_type, gradients.flag.device)
    own = runtime.state_files.gradients.reading(mine)
    by_rank = control.gather_beside(own.view(1), runtime.topology).view(-1)
    if norm_type == math.inf:
        total = model.gather_beside(by_rank.amax()).amax()  # amax, unlike max(), keeps a NaN
    else:
        total = sum_in_pairs(model.gather_beside(sum_in_pairs(by_rank))).sqrt()
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in runtime.reducer.all) else torch.float32
    return gradients.factor.scaled(total).to(dtype)


def _norm_here(runtime: Runtime, model: ModelParallel, norm_type: float, device: torch.device) -> Tensor:
    """The largest element of this rank's gradients, or the sum of their squares; one at a time is read from files."""
    parts = (part for bucket in runtime.buckets for part in _own_parts(runtime, model, bucket))
    if norm_type == math.inf:
        norms = [part.abs().amax().to(torch.float64) for part in parts]
    else:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([norm.to(device, non_blocking=True) for norm in norms])
    return together.amax() if norm_type == math.inf else sum_in_pairs(together.square())


def sum_in_pairs(values: Tensor) -> Tensor:
    """The sum of ``values`` [n] in an order that depends on n alone: torch.sum's differs between devices."""
    while (half := values.numel() // 2) > 0:
        pairs = values[:half] + values[half : 2 * half]
        values = torch.cat([pairs, values[2 * half :]])
    return values.view(())


def _own_parts(runtime: Runtime, model: ModelParallel, bucket: Bucket) -> list[Tensor]:
    """This rank's shard of the gradient by parameter; one model-parallel rank counts what all of them replicate."""
    grads = runtime.reducer.by_bucket.get(bucket.index)
    own = None if grads is None else runtime.reducer.results(grads)
    if grads is None or own is None:
        return []
    if not runtime.stage.shards_states:
        assert grads.rows is not None, "stage 0 keeps this rank's rows of the gradient"
        own = grads.rows
    pieces = bucket.layout.pieces(bucket.row)
    return [own[piece.start : piece.stop] for piece in pieces if model.counts(bucket.params[piece.slot])]
