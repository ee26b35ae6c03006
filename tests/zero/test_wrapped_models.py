"""Wrapped or sharded models are refused with a remedy; models that differ between ranks are found."""

# covers zero/_config/rank_consistency.py

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero
from tests.ranks import run_ranks, topology
from zcomm import ConfigError, LayoutError
from zero import ZeroOptimizer


def _ddp() -> nn.Module:
    return DistributedDataParallel(nn.Linear(4, 4))


def _inner_ddp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), _ddp())


def _fsdp2() -> nn.Module:
    model = nn.Linear(4, 4)
    fully_shard(model)
    return model


def _parameters() -> Any:
    return nn.Linear(4, 4).parameters()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "ddp": (_ddp, "model is a DistributedDataParallel.*give its .module"),
    "inner ddp": (_inner_ddp, "its module '1' is a DistributedDataParallel"),
    "fsdp2": (_fsdp2, "parameter 'weight' is sharded already.*give a plain model"),
    "parameters": (_parameters, "model must be a torch.nn.Module, not its parameters: got generator"),
}


def _check_refused(rank: int, stage: int) -> None:
    for build, text in WRONG.values():
        with pytest.raises(ConfigError, match=text):
            ZeroOptimizer(build(), torch.optim.AdamW, lr=0.1, stage=stage, topology=topology(2))
    config = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 1,
    }
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        zero.initialize(model=_ddp(), config=config)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_wrapped_already_is_refused(stage: int) -> None:
    run_ranks(2, _check_refused, stage)


def _net(rank: int, kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5 if rank == 1 and kind == "shape" else 6), nn.Linear(6, 2))
    if rank == 1 and kind == "dtype":
        model[1].to(torch.bfloat16)
    if rank == 1 and kind == "frozen":
        model[0].bias.requires_grad_(False)
    if rank == 1 and kind == "more":
        model.append(nn.Linear(2, 2))
    return model


TRAINED = r"\[%s\], torch.float32, trained,"
DIFFERENT = {
    "shape": f"parameter '0.bias' is {TRAINED % 6} on rank 0 and {TRAINED % 5} on rank 1; parameter '0.weight' is ",
    "dtype": rf"parameter '1.bias' is {TRAINED % 2} on rank 0 and \[2\], torch.bfloat16, trained, on rank 1",
    "frozen": rf"parameter '0.bias' is {TRAINED % 6} on rank 0 and \[6\], torch.float32, frozen, on rank 1",
    "more": f"parameter '2.bias' is not given on rank 0 and {TRAINED % 2} on rank 1",
}


def _check_named(rank: int, kind: str) -> None:
    with pytest.raises(LayoutError, match=DIFFERENT[kind]) as caught:
        ZeroOptimizer(_net(rank, kind), torch.optim.SGD, lr=0.1, stage=2, topology=topology(2))
    assert "order" not in str(caught.value)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_models_that_differ_between_ranks_are_told_apart_by_parameter(kind: str) -> None:
    run_ranks(2, _check_named, kind)


def _check_order(rank: int) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleDict({"a": first, "b": second} if rank == 0 else {"b": second, "a": first})
    with pytest.raises(
        LayoutError, match=r"the order of parameters is of checksum .* on rank 0 and of checksum .* on rank 1"
    ):
        ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=2, topology=topology(2))


def test_another_order_of_the_same_parameters_is_named() -> None:
    run_ranks(2, _check_order)
