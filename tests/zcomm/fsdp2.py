"""Helpers of the tests of install_fsdp2: models under FSDP2, their full gradients, errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.zcomm.models import batch
from zcomm import Recipe

TWO_HOPS = Recipe(weights="int8", gradients=("int8", "int4"))
AS_IS = Recipe(weights="none", gradients=("none", "none"))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each linear layer as a unit; the root's unit has all other parameters."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def full(parameters: Any) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten().float() for p in parameters])


def full_grad(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.full_tensor().flatten().double() for p in model.parameters() if p.grad is not None])


def error_of(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).float().square().mean()


def value_of(name: str, rank: int, numel: int) -> Tensor:
    seed = 100 * rank + sum(name.encode())
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * (rank + 1)
