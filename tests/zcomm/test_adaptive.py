"""Adaptive precision without ranks: what each setting, signal and role makes of the formats; states; the schedule."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from zcomm import AdaptivePrecision, ConfigError, get_format, relative_error
from zcomm.adaptive import Policy, Role, Signals, Tracked, gradient_ladder, roles_of, weight_ladder
from zcomm.adaptive.signals import Measured
from zcomm.sampling import squares_of

GROUPS = [Tracked(("w", "v"), Role.MATRIX), Tracked(("wte",), Role.CAREFUL), Tracked(("norm",), Role.EXACT)]
QUIET = Signals(grad_norm=1.0, loss=2.0)


def new_policy(asked: tuple[str, str] | None = ("int4", "int4"), **settings: Any) -> Policy:
    chosen = AdaptivePrecision(**settings)
    has_budget = chosen.max_relative_error is not None
    return Policy(chosen, GROUPS, gradient_ladder(asked, has_budget=has_budget), weight_ladder("int8"))


def formats(policy: Policy) -> list[tuple[str, ...]]:
    return [policy.gradient_formats(index) for index in range(len(GROUPS))]


def run(policy: Policy, steps: int, signals: Signals = QUIET) -> None:
    for _ in range(steps):
        policy.end_step(signals)


def test_ladders() -> None:
    def levels(asked: tuple[str, str] | None, *, has_budget: bool = False) -> Any:
        ladder = gradient_ladder(asked, has_budget=has_budget)
        return None if ladder is None else ladder.levels

    assert levels(("int4", "int4")) == (("none", "none"), ("int8", "int8"), ("int4", "int4"))
    assert levels(("int8", "nf4")) == (("none", "none"), ("int8", "int8"), ("int8", "nf4"))
    assert levels(("none", "nf4")) == (("none", "none"), ("none", "int8"), ("none", "nf4"))
    assert levels(("int8", "int8")) == (("none", "none"), ("int8", "int8"))
    assert levels(("fp8_e4m3", "int4"))[1] == ("fp8_e4m3", "int8")
    assert levels(None) is None
    assert levels(("bf16", "bf16"), has_budget=True) is None
    by_budget = gradient_ladder(None, has_budget=True)
    assert by_budget is not None
    bits = [sum(get_format(name).bits_per_element or 32 for name in hops) for hops in by_budget.levels]
    assert bits == sorted(bits, reverse=True)
    assert all(256 % get_format(name).block == 0 for name in by_budget.formats)
    weights = weight_ladder("nf4")
    assert weights is not None
    assert weights.levels == (("none",), ("int8",), ("nf4",))
    assert weight_ladder("bf16") is None


def test_roles_choose_at_least_so_many_bits() -> None:
    policy = new_policy()
    assert formats(policy) == [("int4", "int4"), ("int8", "int8"), ("none", "none")]
    assert [policy.weight_format(index) for index in range(3)] == ["int8", "int8", "none"]


def test_roles_of_parameters() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(64, 64)
            self.gate = nn.Linear(64, 64, bias=False)
            self.gate_proj = nn.Linear(64, 64)
            self.norm = nn.LayerNorm((64, 64))
            self.small = nn.Linear(8, 8, bias=False)
            self.head = nn.Linear(64, 64, bias=False)
            self.head.weight = self.wte.weight
            self.in_proj_bias = nn.Parameter(torch.zeros(64, 64))

    model = Experts()
    roles = roles_of(model)
    named = {name: roles[param].value for name, param in model.named_parameters()}
    assert named == {
        "wte.weight": "careful",
        "gate.weight": "exact",
        "gate_proj.weight": "matrix",
        "gate_proj.bias": "exact",
        "norm.weight": "exact",
        "norm.bias": "exact",
        "small.weight": "exact",
        "in_proj_bias": "exact",
    }


def test_the_schedule_goes_from_the_dtype_over_8_bits_to_what_is_asked_for() -> None:
    policy = new_policy(bf16_steps=3, int8_steps=2)
    seen = []
    for _ in range(7):
        seen.append((policy.gradient_formats(0)[0], policy.weight_format(0)))
        policy.end_step(QUIET)
    assert seen == [("none", "none")] * 3 + [("int8", "int8")] * 2 + [("int4", "int8")] * 2


@pytest.mark.parametrize(
    ("signals", "named"),
    [
        (Signals(grad_norm=1e4, loss=2.0), "gradient norm 1e+04 is 1e+04 times its running mean 1"),
        (Signals(grad_norm=math.inf, loss=2.0), "gradient norm inf"),
        (Signals(grad_norm=1.0, loss=2.5), "loss 2.5 is above its running mean 2 by"),
        (Signals(grad_norm=1.0, loss=math.nan), "loss nan"),
        (Signals(grad_norm=1.0, residual_norm=9.0), "norm of the residuals 9 is 9 times its running mean 1"),
    ],
)
def test_a_jump_backs_off_names_the_signal_and_comes_back(signals: Signals, named: str) -> None:
    policy = new_policy(quiet_steps=4)
    run(policy, 20, Signals(grad_norm=1.0, loss=2.0, residual_norm=1.0))
    verdict = policy.end_step(signals)
    assert policy.limit == 0
    assert len(verdict.warnings) == 1
    assert verdict.warnings[0].startswith(f"step 20: {named}")
    assert "back off to the parameters' dtype for 4 quiet steps" in verdict.warnings[0]
    is_of_norm = signals.grad_norm != 1.0
    assert verdict.action == ("skip" if is_of_norm else "take")
    assert ("the step is skipped" in verdict.warnings[0]) == is_of_norm
    seen, notes = [], []
    for _ in range(11):
        seen.append((policy.gradient_formats(0)[0], policy.weight_format(0)))
        notes += policy.end_step(QUIET).notes
    assert seen == [("none", "none")] * 5 + [("int8", "int8")] * 5 + [("int4", "int8")]
    assert len(notes) == 2
    assert "a level less exact again" in notes[0]
    assert "as before the jump" in notes[1]


def test_what_a_step_does_with_an_outlier() -> None:
    outlier = Signals(grad_norm=50.0)
    for chosen, action in (("skip", "skip"), ("clip", "clip"), ("keep", "take")):
        policy = new_policy(outlier=chosen)
        run(policy, 20)
        verdict = policy.end_step(outlier)
        assert (verdict.action, verdict.max_norm) == (action, 1.0)
        assert policy.limit == 0
    clipping = new_policy(outlier="clip")
    assert clipping.end_step(Signals(grad_norm=math.nan)).action == "skip"  # there is nothing to scale, or to scale to
    run(clipping, 20)
    assert clipping.end_step(Signals(grad_norm=math.inf)).action == "skip"


def test_a_new_level_is_no_outlier_for_long() -> None:
    """Three steps in a row are said once each way; then training goes on, with the new norm as the usual one."""
    policy = new_policy(quiet_steps=2)
    run(policy, 30)
    verdicts = [policy.end_step(Signals(grad_norm=100.0)) for _ in range(30)]
    assert [verdict.action for verdict in verdicts[:4]] == ["skip", "skip", "skip", "take"]
    assert all(verdict.action == "take" for verdict in verdicts[3:])
    texts = [text for verdict in verdicts for text in verdict.warnings]
    assert len(texts) == 2
    assert "from here on it is no outlier" in texts[1]
    assert formats(policy)[0] == ("int4", "int4")


def test_noise_and_a_falling_loss_do_not_jump() -> None:
    rng = random.Random(0)
    policy = new_policy()
    for step in range(2000):
        loss = 1.5 + 4 * math.exp(-step / 200) + rng.gauss(0, 0.1)
        norm = 0.5 + 10 * math.exp(-step / 20) + abs(rng.gauss(0, 0.4))
        policy.end_step(Signals(grad_norm=norm, loss=loss))
        assert policy.limit is None, step


def measured(int8: float, nf4: float, nf4_128: float, *, rotated: float = 1.0) -> Measured:
    errors = {"int8": int8, "nf4": nf4, "nf4/128": nf4_128}
    return Measured({**errors, "nf4:hadamard": nf4 * rotated, "nf4/128:hadamard": nf4_128 * rotated}, 3.0)


@pytest.mark.parametrize(
    ("budget", "errors", "expected"),
    [
        (0.15, measured(0.007, 0.09, 0.1), ("nf4/128", "nf4/128")),  # sqrt(2) * 0.1
        (0.14, measured(0.007, 0.09, 0.1), ("int8", "nf4")),
        (0.08, measured(0.007, 0.09, 0.1), ("int8", "int8")),
        (0.005, measured(0.007, 0.09, 0.1), ("none", "none")),
        (0.14, measured(0.007, 0.09, 0.1, rotated=0.95), ("nf4/128:hadamard", "nf4/128:hadamard")),
        (0.15, measured(0.007, 0.09, 0.1, rotated=0.95), ("nf4/128", "nf4/128")),
        (0.15, measured(0.007, 0.09, 0.1, rotated=0.8), ("nf4/128:hadamard", "nf4/128:hadamard")),
    ],
)
def test_a_budget_takes_the_fewest_bits_that_keep_it(
    budget: float, errors: Measured, expected: tuple[str, str]
) -> None:
    policy = new_policy(None, max_relative_error=budget)
    assert formats(policy)[0] == ("int8", "int8")  # until something is measured
    assert policy.measures
    policy.end_step(Signals(grad_norm=1.0, measured={0: errors, 1: errors}))
    assert formats(policy)[0] == expected
    assert formats(policy)[2] == ("none", "none")
    assert not policy.measures
    run(policy, 49)
    assert policy.measures


def test_an_error_that_jumps_backs_off_its_group_alone() -> None:
    policy = new_policy(sample_interval=1, quiet_steps=3)
    usual = {0: Measured({"int8": 0.01, "int4": 0.1}, 3.0), 1: Measured({"int8": 0.01, "int4": 0.1}, 3.0)}
    run(policy, 20, Signals(grad_norm=1.0, measured=usual))
    bad = {**usual, 0: Measured({"int8": 0.02, "int4": 0.3}, 20.0)}
    (text,) = policy.end_step(Signals(grad_norm=1.0, measured=bad)).warnings
    assert "the error of gradients exceeds its running mean in 1 groups, first 'w'" in text
    seen = []
    for _ in range(6):
        seen.append([hops[0] for hops in formats(policy)[:2]])
        policy.end_step(Signals(grad_norm=1.0, measured=usual))
    assert seen == [["int8", "int8"]] * 4 + [["int4", "int8"]] * 2
    assert policy.limit is None


def test_a_restored_policy_decides_as_if_it_had_never_been_saved() -> None:
    rng = random.Random(1)
    signals = []
    for step in range(240):
        norm = 1 + rng.random() + (1e4 if step in (60, 150) else 0)
        errors = {0: measured(0.007, 0.05 + 0.1 * rng.random(), 0.1), 1: measured(0.007, 0.09, 0.1)}
        signals.append(Signals(grad_norm=norm, loss=3 + rng.random(), measured=errors if step % 7 == 0 else {}))
    settings: dict[str, Any] = {"max_relative_error": 0.12, "sample_interval": 7, "quiet_steps": 20, "bf16_steps": 5}
    whole, resumed = new_policy(None, **settings), new_policy(None, **settings)
    for step, of_step in enumerate(signals):
        if step % 13 == 0:
            saved = json.loads(json.dumps(resumed.state_dict()))
            resumed = new_policy(None, **settings)
            resumed.load_state_dict(saved)
        assert whole.end_step(of_step) == resumed.end_step(of_step)
        assert formats(whole) == formats(resumed)
    assert whole.state_dict() == resumed.state_dict()


def test_squares_add_up_to_the_errors_that_are_measured_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096) ** 3
    parts = [squares_of(part, ["int8", "int4"]) for part in x.split(1024)]
    square, fourth, *errors = torch.stack(parts).sum(0).tolist()
    assert square == pytest.approx(x.double().square().sum().item(), rel=1e-12)
    assert fourth == pytest.approx(x.double().pow(4).sum().item(), rel=1e-12)
    for name, error in zip(("int8", "int4"), errors, strict=True):
        assert math.sqrt(error / square) == pytest.approx(relative_error(x, name), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_relative_error": 0.0}, "max_relative_error must be greater than 0"),
        ({"max_relative_error": math.nan}, "max_relative_error must be a number"),
        ({"bf16_steps": -1}, "bf16_steps must be at least 0"),
        ({"quiet_steps": 1.5}, "quiet_steps must be an integer"),
        ({"outlier": "drop"}, "outlier must be one of skip, clip, keep: outlier='drop'"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptivePrecision(**settings)


def test_ways_to_say_it() -> None:
    settings = AdaptivePrecision(bf16_steps=5)
    assert AdaptivePrecision.of(settings) is settings
    assert AdaptivePrecision.of({"bf16_steps": 5}) == settings
    assert AdaptivePrecision.of(True) == replace(settings, bf16_steps=0)
    assert AdaptivePrecision.of(None) is None
    with pytest.raises(ConfigError, match=r"adaptive takes max_relative_error, .*: got 'bf16_step'"):
        AdaptivePrecision.of({"bf16_step": 5})
    with pytest.raises(ConfigError, match="adaptive must be True, a dict or a"):
        AdaptivePrecision.of(3)  # type: ignore[arg-type]
