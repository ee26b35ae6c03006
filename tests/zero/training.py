"""Trains a test model under ZeroOptimizer on one rank of the pool."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks import topology
from tests.zero.models import batch, groups_of, loss_of, new_model
from zero import GatheredParameters, ZeroOptimizer


@contextmanager
def zero_optimizer(
    model: nn.Module, optimizer: Any = None, *, ranks_per_node: int | None = None, **options: Any
) -> Any:
    """A ZeroOptimizer on this rank's cached topology, closed at the end. Default: AdamW with two parameter groups."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    world_size = int(torch.distributed.get_world_size())
    wrapped = ZeroOptimizer(model, optimizer, topology=topology(ranks_per_node or world_size), **options)
    try:
        yield wrapped
    finally:
        wrapped.close()


def train(
    model: nn.Module,
    optimizer: ZeroOptimizer,
    rank: int,
    *,
    steps: int,
    num_micro: int = 1,
    max_norm: float | None = None,
    uses_no_sync: bool = False,
) -> list[float]:
    """The loop that a user writes. Returns the norms from ``clip_grad_norm_``."""
    norms = []
    for step in range(steps):
        for micro in range(num_micro):
            defers = uses_no_sync and micro < num_micro - 1
            with optimizer.no_sync() if defers else nullcontext():
                optimizer.scale(loss_of(model, *batch(step, micro, rank)) / num_micro).backward()
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all full parameters, on every rank."""
    params = dict(model.named_parameters())
    with GatheredParameters(params.values()):
        return {name: p.detach().clone() for name, p in params.items()}


def train_and_collect(
    rank: int,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    model_options: dict[str, bool] | None = None,
    loop: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train a fresh model and return its parameters."""
    with ExitStack() as stack:
        model = new_model(dtype, **(model_options or {}))
        optimizer = stack.enter_context(zero_optimizer(model, **options))
        train(model, optimizer, rank, steps=steps, **(loop or {}))
        return full_values(model)


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"differ: {different}"
