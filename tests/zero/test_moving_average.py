"""zero.MovingAverage against torch's AveragedModel of plain training in one process."""

# covers zero/_step/moving_average.py

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.ranks import by_first_rank, run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import full_values, train, zero_optimizer
from zcomm import ConfigError, StateError
from zero import MovingAverage, load_checkpoint, save_checkpoint

WORLD, DECAY = 2, 0.7


@cache
def _expected(dtype: torch.dtype, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: the trained parameters, and the averages, of one process."""
    return by_first_rank(partial(_averaged, dtype, steps))


def _averaged(dtype: torch.dtype, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = new_model(dtype, has_frozen=True)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        sum(loss_of(model, *batch(step, 0, rank)) / WORLD for rank in range(WORLD)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return _values(model), _values(average.module)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def _assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        loose = value.dtype == torch.float32
        torch.testing.assert_close(got[name], value, rtol=1e-4 if loose else 1e-9, atol=2e-5 if loose else 1e-12)


def _check(rank: int, dtype: torch.dtype, options: dict[str, Any], folder: str) -> None:
    trained, averaged = _expected(dtype, 5)
    model = new_model(dtype, has_frozen=True)
    with zero_optimizer(model, **options) as optimizer:
        average = MovingAverage(optimizer, DECAY)
        for step in range(5):
            _step(model, optimizer, rank, step)
            average.update()
        before = full_values(model)
        _assert_close(before, trained)
        with average.applied():
            _assert_close(full_values(model), averaged)
            save_checkpoint(optimizer, folder, "average")
            with pytest.raises(StateError, match=r"leave applied\(\) before step"):
                optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())
        _step(model, optimizer, rank, 5)
        after = full_values(model)
    again = new_model(dtype, seed=1, has_frozen=True)
    with zero_optimizer(again, **{**options, "stage": 3 - options["stage"]}) as optimizer:
        average = MovingAverage(optimizer, DECAY)
        own = full_values(again)
        with average.applied():
            load_checkpoint(optimizer, folder, "average", load_module_only=True)
        assert all(torch.equal(v, own[k]) for k, v in full_values(again).items() if after[k].requires_grad)
        with average.applied():
            _assert_close(full_values(again), averaged)


def _step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, *batch(step, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_average_is_that_of_torchs_averaged_model(stage: int, tmp_path: Any) -> None:
    run_ranks(WORLD, _check, torch.float64, {"stage": stage}, str(tmp_path))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_average_of_offloaded_masters(device: str, tmp_path: Any) -> None:
    where = {"device": device, "nvme_path": str(tmp_path)}
    run_ranks(WORLD, _check, torch.float32, {"stage": 3, "offload_optimizer": where}, str(tmp_path / "saved"))


def _check_no_trace(rank: int, options: dict[str, Any], per_node: int) -> None:
    """Applying averages changes no bit of later training, whatever the mode keeps beside the masters."""
    results = []
    for is_applied in (False, True):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, ranks_per_node=per_node, **options) as optimizer:
            average = MovingAverage(optimizer)
            train(model, optimizer, rank, steps=3)
            average.update()
            train(model, optimizer, rank, steps=1)
            if is_applied:
                with average.applied():
                    pass
            train(model, optimizer, rank, steps=2)
            results.append(full_values(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize(
    "options", [{"stage": 2, "mode": "delta"}, {"stage": 3, "mode": "delta_hpz"}, {"stage": 1}], ids=str
)
def test_training_goes_on_with_the_same_bits(options: dict[str, Any]) -> None:
    run_ranks(4, _check_no_trace, options, 2)


def _check_early_block(rank: int, stage: int, folder: str) -> None:
    """An evaluation before the first update changes nothing of it, unless averages were loaded."""
    _, averaged = _expected(torch.float64, 5)
    model = new_model(torch.float64, has_frozen=True)
    with zero_optimizer(model, stage=stage) as optimizer:
        average = MovingAverage(optimizer, DECAY)
        before = full_values(model)
        with average.applied():
            _assert_close(full_values(model), before)
        for step in range(5):
            _step(model, optimizer, rank, step)
            average.update()
        with average.applied():
            _assert_close(full_values(model), averaged)
            save_checkpoint(optimizer, folder, "averages")
        again = MovingAverage(optimizer, DECAY)
        with again.applied():
            load_checkpoint(optimizer, folder, "averages", load_module_only=True)
        with again.applied():
            _assert_close(full_values(model), averaged)


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_that_are_read_before_the_first_update(stage: int, tmp_path: Any) -> None:
    run_ranks(WORLD, _check_early_block, stage, str(tmp_path))


def test_a_decay_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="decay=1"):
        MovingAverage(object(), decay=1.0)


def _check_torchs_own(rank: int, stage: int) -> None:
    """torch's AveragedModel works where parameters are full, and at stage 3 says what to do."""
    model = new_model(torch.float64, has_frozen=True)
    with zero_optimizer(model, stage=stage) as optimizer:
        if stage == 3:
            with pytest.raises(StateError, match=r"is released .* was used by deepcopy"):
                AveragedModel(model)
            return
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for step in range(5):
            _step(model, optimizer, rank, step)
            average.update_parameters(model)
    _assert_close(_values(average.module), _expected(torch.float64, 5)[1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_own_average_needs_full_parameters(stage: int) -> None:
    run_ranks(WORLD, _check_torchs_own, stage)
