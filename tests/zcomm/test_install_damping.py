"""Recipes that damp and reset residuals: the effect on the gradients that DDP and FSDP2 exchange."""

# covers zcomm/__init__.py

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.fsdp2 import error_of, full_grad, value_of
from tests.zcomm.models import Given, flat_grad
from zcomm import ConfigError, Recipe

SIZES = {"a": 5000, "b": 3001}


def _exchanged(rank: int, engine: str, **damping: Any) -> tuple[zcomm.Installation, list[Tensor]]:
    """The results of exchanging the same gradients 8 times."""
    recipe = Recipe(weights="none", gradients=("none", "int4"), reduced="none", residual=True, **damping)
    model: nn.Module = Given(SIZES)
    if engine == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        installed = zcomm.install_ddp(wrapped, recipe, topology=topology(2))
    else:
        wrapped = fully_shard(model)
        installed = zcomm.install_fsdp2(model, recipe, topology=topology(2))
    grads = []
    for _ in range(8):
        wrapped({name: value_of(name, rank, numel) for name, numel in SIZES.items()}).backward()
        grads.append((flat_grad(model) if engine == "ddp" else full_grad(model)).clone())
        wrapped.zero_grad()
    return installed, grads


def _check(rank: int, engine: str) -> None:
    exact = sum(torch.cat([value_of(n, r, numel) for n, numel in SIZES.items()]).double() for r in range(4)) / 4
    kept, damped, every = (
        _exchanged(rank, engine, **damping)[1]
        for damping in ({}, {"residual_beta": 0.5}, {"residual_reset_interval": 1})
    )
    off = [error_of(torch.stack(grads[1:]).mean(0), exact) for grads in (kept, damped, every)]
    assert off[0] < off[1] / 1.5 < off[2] / 2  # of a mean of 7: a loss that comes back whole, by half, or never
    assert all(torch.equal(grad, every[1]) for grad in every[1:])  # DDP lays its buckets out anew after the first
    installed, grads = _exchanged(rank, engine, residual_reset_interval=3)
    assert installed.residuals[0].reset_interval == 3
    assert [index for index in range(1, 8) if torch.equal(grads[index], every[1])] == [3, 6]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_damping_and_resets_take_effect(engine: str) -> None:
    run_ranks(4, _check, engine)


def _check_refused(rank: int) -> None:
    model = DistributedDataParallel(Given({"a": 4}))
    for damping, text in (({"residual_beta": 0}, "residual_beta=0"), ({"residual_reset_interval": -1}, "=-1")):
        with pytest.raises(ConfigError, match=text):
            zcomm.install_ddp(model, Recipe(**damping), topology=topology(2))


def test_what_cannot_be_meant_is_refused() -> None:
    run_ranks(4, _check_refused)
