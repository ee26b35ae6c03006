"""install_ddp and install_fsdp2 with adaptive precision: what travels, outliers, and going on from a saved state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.fsdp2 import sharded
from tests.zcomm.models import batch, mlp
from zcomm import ConfigError, StateError

ADAPTIVE = {"int8_steps": 2, "quiet_steps": 1, "sample_interval": 3}
FORMATS = ("none", "int8", "nf4")


def _installed(kind: str, adaptive: Any = None, recipe: str = "accurate") -> tuple[nn.Module, zcomm.Installation]:
    model = nn.Sequential(mlp(128), nn.LayerNorm(8))
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        return wrapped, zcomm.install_ddp(wrapped, recipe, topology=topology(2), adaptive=adaptive)  # type: ignore[arg-type]
    wrapped = sharded(model)
    return wrapped, zcomm.install_fsdp2(wrapped, recipe, topology=topology(2), adaptive=adaptive)


def _step(model: nn.Module, installed: zcomm.Installation, rank: int, step: int, factor: float = 1.0) -> bool:
    """Plain gradient descent, as the installation decides."""
    model.zero_grad()
    loss = (model(batch(rank, step)) - 1).square().mean() * factor
    loss.backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    is_taken = installed.end_step(loss=loss.item() / factor, grad_norm=norm.item())
    if is_taken:
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)
    return is_taken


def _sent_between_nodes(operation: str, sent: zcomm.Traffic) -> set[str]:
    return {name for name in FORMATS if sent.bytes(operation=operation, format=name, link="inter")}


def _values(model: nn.Module) -> Tensor:
    return torch.cat([
        (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().flatten()
        for param in model.parameters()
    ])  # fmt: skip


def _check(rank: int, kind: str) -> None:
    operation = "all_reduce" if kind == "ddp" else "reduce_scatter"
    model, installed = _installed(kind, ADAPTIVE)
    seen, taken, states = [], [], {}
    for step in range(18):
        with zcomm.traffic() as sent:
            taken.append(_step(model, installed, rank, step, 1e5 if step == 12 else 1.0))
        seen.append(_sent_between_nodes(operation, sent))
        if step == 13:
            states = copy.deepcopy({"model": _state(model), "installed": installed.state_dict()})
    few = {"none", "nf4"} | ({"int8"} if kind == "ddp" else set())  # DDP's way back; vectors travel as they are
    assert seen[:2] == [{"none", "int8"}] * 2
    assert all(one == few for one in seen[2:13]), seen
    assert seen[13:15] == [{"none"}] * 2, seen[13:]
    assert seen[15:17] == [{"none", "int8"}] * 2, seen[13:]
    assert seen[17] == few
    assert taken == [step != 12 for step in range(18)]
    assert installed.residuals
    assert "adaptive precision" not in str(installed.report()).splitlines()[1]
    expected = _values(model)
    installed.uninstall()
    model, installed = _installed(kind, ADAPTIVE)
    _load(model, states["model"])
    installed.load_state_dict(states["installed"])
    for step in range(14, 18):
        assert _step(model, installed, rank, step)
    if kind == "fsdp2":  # DDP starts with other buckets
        assert torch.equal(_values(model), expected)
    else:
        assert torch.allclose(_values(model), expected, atol=1e-2)
    installed.uninstall()
    clipping, installed = _installed(kind, {"outlier": "clip"})
    for step in range(12):
        before = _values(clipping)
        assert _step(clipping, installed, rank, step, 1e5 if step == 11 else 1.0)
    assert (_values(clipping) - before).norm() < 1
    installed.uninstall()
    _, installed = _installed(kind)
    with pytest.raises(StateError, match="pass adaptive=True when installing"):
        installed.end_step(loss=1.0)
    installed.uninstall()


def _state(model: nn.Module) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]


def _load(model: nn.Module, state: list[Tensor]) -> None:
    with torch.no_grad():
        for param, values in zip(model.parameters(), state, strict=True):
            (param.to_local() if hasattr(param, "to_local") else param).copy_(values)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_formats_follow_the_schedule_and_back_off(kind: str) -> None:
    run_ranks(4, _check, kind)


def _check_refusals(rank: int) -> None:
    as_is = zcomm.Recipe(gradients=("none", "bf16"))
    model = DistributedDataParallel(mlp())
    with pytest.raises(ConfigError, match="needs gradients that are quantized: recipe 'own' has none, bf16"):
        zcomm.install_ddp(model, as_is, topology=topology(2), adaptive=True)
    with pytest.raises(ConfigError, match="adaptive takes max_relative_error"):
        zcomm.install_ddp(model, topology=topology(2), adaptive={"budget": 1})


def test_what_cannot_adapt_is_refused() -> None:
    run_ranks(4, _check_refusals)
