"""A compiled model under install_ddp and install_fsdp2 trains as the same model does eagerly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 8))


def _trained(rank: int, engine: str, is_compiled: bool) -> list[torch.Tensor]:  # noqa: FBT001
    model: Any = _layers()
    compiled = {"backend": "aot_eager"}
    if engine == "ddp":
        model = DistributedDataParallel(torch.compile(model, **compiled) if is_compiled else model)
        installed = zcomm.install_ddp(model, topology=topology(2))
    else:
        for layer in (model[0], model[2], model[4]):
            if is_compiled:
                layer.compile(**compiled)
            fully_shard(layer)
        fully_shard(model)
        installed = zcomm.install_fsdp2(model, topology=topology(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with zcomm.traffic() as sent:
        for _ in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sent.bytes(format="int4") > 0
    installed.uninstall()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def _check(rank: int, engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        compiled = _trained(rank, engine, is_compiled=True)
    for a, b in zip(compiled, _trained(rank, engine, is_compiled=False), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_compiled_models_train_as_eager_ones(engine: str) -> None:
    run_ranks(4, _check, engine)
