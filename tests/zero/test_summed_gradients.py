"""``gradient_allreduce_op: "sum"``: gradients are the sum over the ranks."""

# covers zero/_gradients/bucket_reduce_scatter.py zero/engine.py zero/_access/safe_access.py

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.ranks import run_ranks
from zcomm import ConfigError


def _engine(stage: int, **config: Any) -> zero.Engine:
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "gradient_allreduce_op": "sum",
        **config,
    }
    return zero.initialize(model=model, config=given).engine


def _weight(engine: zero.Engine) -> torch.Tensor:
    param = next(engine.module.parameters())
    with zero.GatheredParameters(param):
        return param.detach().clone()


def _check_step(rank: int, world_size: int, stage: int, accumulation: int) -> None:
    """Micro-batch m of rank r gives the gradient r + m: small integers, whose sums are exact."""
    engine = _engine(stage, gradient_accumulation_steps=accumulation)
    for micro in range(accumulation):
        engine.backward(engine(torch.full((1, 8), float(accumulation * (rank + micro)))).sum())
        if micro == accumulation - 1:
            expected = sum(float(r + m) for r in range(world_size) for m in range(accumulation))
            grad = zero.utils.safe_get_full_grad(next(engine.module.parameters()))
            assert grad is not None
            assert torch.equal(grad, torch.full((1, 8), expected))
        engine.step()
    assert torch.equal(_weight(engine), torch.full((1, 8), -expected))
    engine.destroy()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_takes_the_sum_of_the_ranks_gradients(world_size: int, stage: int, accumulation: int) -> None:
    run_ranks(world_size, _check_step, world_size, stage, accumulation)


def _check_assigned(rank: int, stage: int) -> None:
    """The sum that was read, set again, changes nothing; what is set without a backward counts by its mean."""
    engine = _engine(stage)
    param = next(engine.module.parameters())
    engine.backward(engine(torch.full((1, 8), float(rank + 1))).sum())
    grad = zero.utils.safe_get_full_grad(param)
    assert grad is not None
    param.grad = grad.clone()
    engine.step()
    assert torch.equal(_weight(engine), torch.full((1, 8), -3.0))
    param.grad = torch.full((1, 8), float(rank + 1))
    engine.optimizer.step()
    assert torch.equal(_weight(engine), torch.full((1, 8), -4.5))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_set_counts_as_it_is(stage: int) -> None:
    run_ranks(2, _check_assigned, stage)


def _check_unreduced(rank: int) -> None:
    engine = _engine(2)
    param = next(engine.module.parameters())
    with engine.no_sync():
        engine.backward(engine(torch.full((1, 8), float(rank + 1))).sum())
        grad = zero.utils.safe_get_full_grad(param)
        assert grad is not None
        assert torch.equal(grad, torch.full((1, 8), 3.0))
    engine.optimizer.zero_grad()
    engine.destroy()


def test_a_gradient_that_is_not_reduced_yet_is_read_as_a_sum() -> None:
    run_ranks(2, _check_unreduced)


def _check_quantized(rank: int) -> None:
    engine = _engine(2, zcomm={"gradient_format": "int8"})
    engine.backward(engine(torch.full((1, 8), 2.0 * (rank + 1))).sum())
    engine.step()
    assert (_weight(engine) + 6).abs().max() < 0.1
    engine.destroy()
    with pytest.raises(ConfigError, match="gradient_allreduce_op='sum'"):
        _engine(3, zcomm={"mode": "delta_hpz", "ranks_per_node": 1})


def test_sums_travel_in_a_wire_format_and_a_mode_that_averages_refuses_them() -> None:
    run_ranks(2, _check_quantized)
