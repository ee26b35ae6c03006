"""Models compiled by torch.compile train as they do without it, at every stage and with mode="delta"."""

# covers zero/_gather/hooks.py zero/_sharding/units.py

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.rotation import of_the_day
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import zero_optimizer

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage, "stage3_param_persistence_threshold": 0} for stage in range(4)},
    "delta": {"stage": 2, "mode": "delta", "changes": "quantized"},
    "delta_hpz": {"stage": 3, "mode": "delta_hpz"},
}


def _losses(rank: int, how: str, backend: str, options: dict[str, Any], per_node: int) -> list[float]:
    model = new_model(torch.bfloat16 if "mode" in options else torch.float32)
    called: nn.Module = model
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend=backend)
    elif how == "model before":
        model.compile(backend=backend)
    losses = []
    with zero_optimizer(model, ranks_per_node=per_node, **options) as optimizer:
        if how == "model after":
            called = torch.compile(model, backend=backend)
        for step in range(STEPS):
            loss = loss_of(called, *batch(step, 0, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _check(rank: int, how: str, backend: str, name: str) -> None:
    options, per_node = OPTIONS[name], 1 if "delta" in name else 2
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler reads a tensor's .grad even without the library
        eager = _losses(rank, "eager", backend, options, per_node)
        counters.clear()
        compiled = _losses(rank, how, backend, options, per_node)
    breaks, frames = dict(counters["graph_break"]), counters["frames"]["ok"]
    torch._dynamo.reset()
    assert frames > 0, "something was compiled"
    tolerance = 2e-2 if "mode" in options else 1e-5
    torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=0)
    if how == "blocks" or options["stage"] < 3:
        assert breaks == {}, breaks
    else:  # each unit is gathered by a hook that is not compiled
        assert any("torch.compiler.disable" in reason for reason in breaks), breaks


CASES = list(itertools.product(["blocks", "model before", "model after"], OPTIONS))


@pytest.mark.parametrize(("how", "name"), of_the_day(CASES, 7))
def test_losses_are_those_without_compilation(how: str, name: str) -> None:
    run_ranks(2, _check, how, "aot_eager", name)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("how", ["blocks", "model after"])
def test_losses_are_those_without_inductor(how: str, name: str) -> None:
    run_ranks(2, _check, how, "inductor", name)
