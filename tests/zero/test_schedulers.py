"""The JSON's learning rate schedules equal curves written down from their documentation, step by step."""

# covers zero/_optim/lr_schedulers.py

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from zcomm import ConfigError
from zero import initialize
from zero._optim.lr_schedulers import SCHEDULERS, build_scheduler

STEPS = 300
LR = 0.02


def _warmup(t: int, low: float, high: float, num: int, kind: str = "log") -> float | None:
    """The learning rate of optimizer step ``t`` (from 0) during warmup; None afterwards."""
    done = t - 1  # the number of schedule steps taken
    if done >= num:
        return None
    if done < 0:
        return low
    share = math.log(done + 1, num) if kind == "log" else done / num
    return low + share * (high - low)


def _decay(t: int, low: float, high: float, num: int, total: int, kind: str = "log") -> float:
    warm = _warmup(t, low, high, num, kind)
    left = (total - (t - 1)) / (total - num)
    return warm if warm is not None else low + (high - low) * max(left, 0)


def _cosine(t: int, start: float, end: float, num: int, total: int) -> float:
    if t == 0:
        return 0.0
    warm = _warmup(t, start, 1.0, num)
    angle = min((t - num) / (total - num), 1.0) * math.pi
    return LR * (warm if warm is not None else end + (1 - end) * 0.5 * (1 + math.cos(angle)))


def _range(t: int, low: float, size: int, rate: float, *, stairs: bool) -> float:
    return low * (1 + rate * (t // size if stairs else t / size))


def _one_cycle(t: int, low: float, high: float, up: int, down: int, decay: float, interval: int) -> float:
    if t <= up:
        return low + (high - low) * t / up
    if t <= up + down:
        return high - (high - low) * (t - up) / down
    return low / (1 + decay * (t - up - down) / interval)


def _stairs(t: int, low: float, high: float, up: int, num: int) -> float:
    """Up in ``num`` steps of a staircase, down in as many, then constant."""
    if t > 2 * up:
        return low
    stair = (t if t <= up else 2 * up - t) * num // up
    return low + (high - low) * stair / num


CURVES: dict[str, tuple[str, dict[str, Any], Callable[[int], float]]] = {
    "log": (
        "WarmupLR",
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 30},
        lambda t: 1e-3 if (lr := _warmup(t, 1e-5, 1e-3, 30)) is None else lr,
    ),
    "linear, to the optimizer's own": (
        "WarmupLR",
        {"warmup_num_steps": 50, "warmup_type": "linear", "warmup_max_lr": "auto"},
        lambda t: LR if (lr := _warmup(t, 0.0, LR, 50, "linear")) is None else lr,
    ),
    "the tutorials'": (
        "WarmupDecayLR",
        {"total_num_steps": 300, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 30},
        lambda t: _decay(t, 0.0, 3e-5, 30, 300),
    ),
    "ends before": (
        "WarmupDecayLR",
        {"total_num_steps": 200, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"},
        lambda t: _decay(t, 0.0, 1e-2, 3, 200, "linear"),
    ),
    "cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 250, "warmup_num_steps": 20, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01},
        lambda t: _cosine(t, 0.1, 0.01, 20, 250),
    ),
    "range": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 2.0},
        lambda t: _range(t, 1e-4, 7, 2.0, stairs=False),
    ),
    "range in stairs": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 40, "lr_range_test_staircase": True},
        lambda t: _range(t, 1e-4, 40, 1.0, stairs=True),
    ),
    "cycle": (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 60,
            "cycle_second_step_size": 100,
            "decay_lr_rate": 0.5,
            "decay_step_size": 20,
        },
        lambda t: _one_cycle(t, 1e-3, 1e-2, 60, 100, 0.5, 20),
    ),
    "cycle in stairs": (
        "OneCycle",
        {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 60, "cycle_first_stair_count": 4},
        lambda t: _stairs(t, 1e-3, 1e-2, 60, 4),
    ),
}


def _optimizer(num_groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)], lr=LR)


@pytest.mark.parametrize("name", CURVES)
def test_curve(name: str) -> None:
    kind, params, curve = CURVES[name]
    optimizer = _optimizer()
    scheduler = build_scheduler(kind, params, optimizer)
    for t in range(STEPS):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(curve(t), rel=1e-12, abs=1e-15), t
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", CURVES)
def test_a_step_to_a_batch(name: str) -> None:
    """step(n) is DeepSpeed's: batch n is that of the n-th optimizer step after the first one; then steps go on."""
    kind, params, curve = CURVES[name]
    optimizer = _optimizer()
    scheduler = build_scheduler(kind, params, optimizer)
    optimizer.step()
    batch = -1
    for given in (None, 0, 5, None, 29, 30, None, 59, 60, 160, 161, 12, None, 250, 299, None, 1000, 3):
        scheduler.step(given)
        batch = batch + 1 if given is None else given
        assert optimizer.param_groups[0]["lr"] == pytest.approx(curve(batch + 1), rel=1e-12, abs=1e-15), given
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    by_name = "batch_iteration" if kind in ("LRRangeTest", "OneCycle") else "last_batch_iteration"
    scheduler.step(**{by_name: 40})  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(curve(41), rel=1e-12, abs=1e-15)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="compares with DeepSpeed, of the extra peers")
@pytest.mark.filterwarnings("ignore")  # DeepSpeed's
def test_curves_are_deepspeeds() -> None:
    theirs = import_module("deepspeed.runtime.lr_schedules")
    for name, (kind, params, _) in CURVES.items():
        first, second = _optimizer(), _optimizer()
        scheduler = build_scheduler(kind, params, first)
        numbers = {key: LR if value == "auto" else value for key, value in params.items()}
        other = getattr(theirs, kind)(second, **numbers)
        for t in range(STEPS):
            lr = first.param_groups[0]["lr"]
            assert lr == pytest.approx(second.param_groups[0]["lr"], rel=1e-12, abs=1e-15), (name, t)
            for each in (first, second, scheduler, other):
                each.step()


def _check_skipped_steps(rank: int) -> None:
    for name, (kind, params, curve) in CURVES.items():
        config = {
            "fp16": {"enabled": True, "loss_scale": 8.0},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "scheduler": {"type": kind, "params": params},
        }
        engine = initialize(model=nn.Linear(1, 1), config=config).engine
        num_taken = 0
        for t in range(STEPS):
            assert engine.get_lr() == [pytest.approx(curve(num_taken), rel=1e-12, abs=1e-15)], (name, t)
            overflows = t % 7 in (0, 4, 5) and t < 200  # the first step, two in a row, none for long at the end
            loss = engine(torch.ones(1, 1, dtype=torch.float16)).sum()
            engine.backward(loss * (math.inf if overflows else 1.0))
            engine.step()
            num_taken += not overflows
        assert engine.skipped_steps == STEPS - num_taken == 85
        engine.destroy()


def test_skipped_steps_do_not_move_the_curve() -> None:
    """A step whose gradients overflowed keeps the rate, anywhere on any curve."""
    run_ranks(1, _check_skipped_steps)


def test_momentum_goes_the_other_way() -> None:
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 10, "cycle_second_step_size": 20}
    decay = {"decay_step_size": 5, "decay_mom_rate": 0.01}
    for bounds in ((0.8, 0.9), ([0.8, 0.6], [0.9, 0.95])):
        optimizer = _optimizer(2)
        momenta = dict(zip(("cycle_min_mom", "cycle_max_mom"), bounds, strict=True))
        scheduler = build_scheduler("OneCycle", params | momenta | decay, optimizer)
        of_groups = [(0.8, 0.9)] * 2 if bounds == (0.8, 0.9) else [(0.8, 0.9), (0.6, 0.95)]
        for t in range(40):
            height = t / 10 if t <= 10 else (30 - t) / 20
            for group, (low, high) in zip(optimizer.param_groups, of_groups, strict=True):
                expected = high - (high - low) * height if t <= 30 else high * (1 + 0.01 * (t - 30) / 5)
                assert group["betas"] == (pytest.approx(expected), 0.999)
            optimizer.step()
            scheduler.step()
    with pytest.raises(ConfigError, match="cycle_max_mom must be a number or one for each of 2 parameter groups"):
        SCHEDULERS["OneCycle"](optimizer, 1e-3, 1e-2, cycle_max_mom=[0.9])


@pytest.mark.parametrize("name", CURVES)
def test_state_goes_on_where_it_was(name: str) -> None:
    kind, params, curve = CURVES[name]
    first, second = _optimizer(), _optimizer()
    scheduler = build_scheduler(kind, params, first)
    for _ in range(77):
        first.step()
        scheduler.step()
    restored = build_scheduler(kind, params, second)
    restored.load_state_dict(scheduler.state_dict())
    second.step()
    restored.step()
    assert second.param_groups[0]["lr"] == pytest.approx(curve(78), rel=1e-12)


def test_the_schedule_is_that_of_the_configuration_also_after_a_load() -> None:
    """As with DeepSpeed: a longer run goes on by its own length, also from a state that has the old schedule in it."""
    params = {"warmup_max_lr": 0.1, "warmup_num_steps": 2, "warmup_type": "linear"}
    short, optimizer = build_scheduler("WarmupDecayLR", {**params, "total_num_steps": 10}, _optimizer()), _optimizer()
    for _ in range(10):
        short.optimizer.step()
        short.step()
    for more in ({}, {"_total": 10, "_high": [9.0], "base_lrs": [9.0]}):
        long = build_scheduler("WarmupDecayLR", {**params, "total_num_steps": 100}, optimizer)
        long.load_state_dict({**short.state_dict(), **more})
        optimizer.step()
        long.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (100 - 10) / (100 - 2), rel=1e-12)
        optimizer = _optimizer()


def test_one_bound_for_each_group() -> None:
    optimizer = _optimizer(2)
    scheduler = build_scheduler("WarmupLR", {"warmup_max_lr": [1.0, 2.0], "warmup_num_steps": 2}, optimizer)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]
    with pytest.raises(ConfigError, match="one for each of 2 parameter groups"):
        build_scheduler("WarmupLR", {"warmup_max_lr": [1.0]}, optimizer)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupDecayLR", {"total_steps": 3}, r"no 'total_steps' \(did you mean 'total_num_steps'\?\)"),
        ("WarmupDecayLR", {}, "must have a value for total_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "must have a value for total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0}, "must have a value for cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_rate": 1}, "no 'decay_rate'"),
        ("WarmupLR", {"warmup_type": "cosine"}, "must be one of log, linear"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be at least 0"),
        ("Cosine", {}, "must be one of"),
    ],
)
def test_mistakes_are_named(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler(kind, params, _optimizer())


def test_all_five_are_there() -> None:
    assert set(SCHEDULERS) == {"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}
    assert {kind for kind, _, _ in CURVES.values()} == set(SCHEDULERS)


def test_the_momentum_of_one_cycle_can_be_asked_for() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cycle: dict[str, Any] = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.2,
        "cycle_first_step_size": 2,
        "cycle_second_step_size": 0,
    }
    schedule: Any = SCHEDULERS["OneCycle"](optimizer, **cycle, cycle_min_mom=0.5, cycle_max_mom=0.75)
    found = [schedule.get_mom()]
    optimizer.step()
    schedule.step(0)
    assert found == [[(0.75, 0.999)]]
    assert schedule.get_mom() == [optimizer.param_groups[0]["betas"]] == [(0.625, 0.999)]
    schedule = SCHEDULERS["OneCycle"](optimizer, **cycle, cycle_momentum=False)
    assert schedule.get_mom() is None
