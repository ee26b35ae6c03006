"""Ranks that install different recipes: the same named error on every rank, and nothing is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.models import mlp
from zcomm import RECIPES, ConfigError, Recipe

ZEROPP = RECIPES["zeropp"]
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"recipe": "zeropp"},
        {"recipe": "accurate"},
        "recipe.gradients is int4, int4 on ranks 0, 1, 3, int8, nf4 on rank 2",
    ),
    ({}, {"recipe": replace(ZEROPP, weights="int8/64")}, "recipe.weights is int8 on ranks 0, 1, 3, int8/64 on rank 2"),
    ({}, {"recipe": replace(ZEROPP, min_numel=7)}, "recipe.min_numel is 2048 on ranks 0, 1, 3, 7 on rank 2"),
    ({"recipe": "zerop"}, {}, "recipe is 'zerop' on ranks 0, 1, 3, not given on rank 2"),
    ({}, {"overrides": {"0": "bf16"}}, "overrides['0'] is not given on ranks 0, 1, 3, bf16 on rank 2"),
    (
        {"overrides": {"0": "int8"}},
        {"overrides": {"0": "int8/64:asym"}},
        "'0'] is int8 on ranks 0, 1, 3, int8/64:asym on",
    ),
    ({}, {"shadow": True}, "shadow is False on ranks 0, 1, 3, True on rank 2"),
    ({"adaptive": True}, {"adaptive": {"bf16_steps": 3}}, "adaptive.bf16_steps is 0 on ranks 0, 1, 3, 3 on rank 2"),
    ({}, {"topology": None}, "topology is "),
]


def _check_differing(rank: int) -> None:
    ddp, sharded = DistributedDataParallel(mlp()), mlp()
    fully_shard(sharded)
    install: list[tuple[Callable[..., Any], Any]] = [(zcomm.install_ddp, ddp), (zcomm.install_fsdp2, sharded)]
    for mine, other, text in CASES:
        for function, model in install:
            arguments = {"topology": topology(2), **(other if rank == 2 else mine)}
            with pytest.raises(ConfigError, match=f"{function.__name__} must get the same .*{re.escape(text)}"):
                function(model, **arguments)
    same = Recipe(name="elsewhere", weights="int8/256") if rank == 2 else ZEROPP  # in other words
    for function, model in install:
        function(model, same, topology=topology(2)).uninstall()


def test_settings_that_differ_are_named_on_every_rank() -> None:
    run_ranks(4, _check_differing)


def _check_replicas(rank: int) -> None:
    """Rank 2 shares no group with rank 1, and hears of it from the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    fully_shard(model, mesh=mesh["shard"])
    recipe = "accurate" if rank == 1 else "zeropp"
    with pytest.raises(ConfigError, match=r"recipe\.residual is False on ranks 0, 2, 3, True on rank 1"):
        zcomm.install_fsdp2(model, recipe, replicate_group=mesh["replicate"].get_group())
    torch.distributed.barrier()


def test_what_differs_between_shards_reaches_every_replica() -> None:
    run_ranks(4, _check_replicas)
