"""Ranks install different recipes, or cannot install: the same named error on all, and nothing is installed."""

# covers zcomm/install/agreement.py zcomm/install/choices.py

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.models import mlp
from zcomm import RECIPES, ConfigError, Recipe, StateError
from zcomm.install import agreement

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
    """Rank 2 shares no group with rank 1, and gets the error through the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    fully_shard(model, mesh=mesh["shard"])
    recipe = "accurate" if rank == 1 else "zeropp"
    with pytest.raises(ConfigError, match=r"recipe\.residual is False on ranks 0, 2, 3, True on rank 1"):
        zcomm.install_fsdp2(model, recipe, replicate_group=mesh["replicate"].get_group())
    torch.distributed.barrier()


def test_what_differs_between_shards_reaches_every_replica() -> None:
    run_ranks(4, _check_replicas)


class _Foreign:
    """A communication hook of another library."""


def _sharded() -> nn.Module:
    model = mlp()
    fully_shard(model)
    return model


def _with_foreign_gather() -> nn.Module:
    model = _sharded()
    model.set_custom_all_gather(_Foreign())
    return model


def _hook(state: object, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError("never called")


def _with_foreign_hook() -> nn.Module:
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, _hook)
    return ddp


def _refused(rank: int, function: Any, model: nn.Module, kind: type[Exception], text: str) -> str:
    with pytest.raises(kind, match=text) as raised:
        function(model, topology=topology(2))
    assert type(raised.value) is kind
    return str(raised.value)


def _check_refused_by_one(rank: int) -> None:
    """Rank 1's model is refused; if the model names no group, the topology's ranks agree, or all ranks."""
    texts, is_one = [], rank == 1
    ddp, sharded = DistributedDataParallel(mlp()), _sharded()
    with_hook, with_gather = _with_foreign_hook(), _with_foreign_gather()  # on every rank: DDP compares parameters
    cases: list[tuple[Any, nn.Module, type[Exception], str]] = [
        (zcomm.install_ddp, mlp() if is_one else ddp, ConfigError, "must be a DistributedDataParallel: got Sequential"),
        (zcomm.install_ddp, with_hook if is_one else ddp, StateError, "has a communication hook"),
        (zcomm.install_fsdp2, mlp() if is_one else sharded, ConfigError, "has no module with sharded parameters"),
        (zcomm.install_fsdp2, with_gather if is_one else sharded, StateError, r"'\(root\)' already has a"),
    ]
    for function, model, kind, text in cases:
        texts.append(_refused(rank, function, model, kind, f"^{function.__name__} fails on rank 1: .*{text}"))
    with pytest.raises(ConfigError, match=r"^install_ddp fails on rank 1: model must be a Distr"):  # no topology
        zcomm.install_ddp(mlp() if is_one else ddp)
    names = [{"nowhere": "bf16"}, {"body": "bf16"}, {"nowhere": "bf16"}, {"2": "bf16"}]
    with pytest.raises(
        ConfigError, match=r"install_ddp must get the same .*overrides\['nowhere'\] is bf16 on ranks 0, 2, "
    ):
        zcomm.install_ddp(ddp, overrides=names[rank])
    gathered: list[Any] = [None] * 4
    torch.distributed.all_gather_object(gathered, texts)
    assert all(of_rank == texts for of_rank in gathered)
    if not is_one:
        assert not ddp._comm_hooks  # nothing was installed
    zcomm.install_ddp(ddp, topology=topology(2)).uninstall()
    zcomm.install_fsdp2(sharded, topology=topology(2)).uninstall()


def test_what_one_rank_refuses_all_raise_with_its_number() -> None:
    run_ranks(4, _check_refused_by_one)


def _check_alone(rank: int) -> None:
    """A rank whose model names no group, and which no other rank joins, raises its own error after a timeout."""
    ddp = DistributedDataParallel(mlp())
    if rank == 1:
        agreement.WAIT_FOR_UNKNOWN = timedelta(seconds=0.1)
        with pytest.raises(ConfigError, match=r"^model must be a DistributedDataParallel"):
            zcomm.install_ddp(mlp())
        agreement.WAIT_FOR_UNKNOWN = timedelta(seconds=10)
    torch.distributed.barrier()
    if rank != 1:  # later: rank 1's text is in the store already
        with pytest.raises(zcomm.CommunicationError, match=r"rank 1: .*model must be a DistributedDataParallel"):
            zcomm.install_ddp(ddp)
    torch.distributed.barrier()


def test_a_refused_rank_that_nobody_joins_does_not_hang() -> None:
    run_ranks(2, _check_alone)


def _check_many_errors(rank: int) -> None:
    with pytest.raises(ConfigError) as raised:
        agreement.agree("install", {}, [torch.distributed.group.WORLD], partial(_fail, rank))
    texts = [f"on rank {one}: I am {one}" for one in (0, 1, 2)]
    assert str(raised.value) == f"install fails {'; '.join(texts)}; on rank 3: an odd one"
    with pytest.raises(ConfigError, match=r"^I am 0$"):
        agreement.agree("install", {}, [torch.distributed.group.WORLD], partial(_fail, 0))


def _fail(rank: int) -> None:
    raise ConfigError(f"I am {rank}") if rank < 3 else ValueError("an odd one")


def test_errors_of_several_ranks_are_all_told() -> None:
    run_ranks(4, _check_many_errors)
