"""Loss scaling: the scale follows the oracle's rule on scripted overflows, and a skipped step changes nothing else."""

# covers zero/_config/value_types.py zero/_optim/loss_scale.py

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.zero.models import TinyGPT, as_vector, batch, loss_of, new_model, relative_error
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero import CPUAdam, ZeroOptimizer, utils
from zero._optim.loss_scale import DynamicLossScale, StaticLossScale


def scales_by_the_rule(
    overflows: list[bool], *, power: int, window: int, hysteresis: int, consecutive: bool, least: float
) -> list[float]:
    """The scale of each step, by its history: since the last overflow, and since the hysteresis was used up."""
    scale, used = 2.0**power, []
    for now in range(len(overflows)):
        used.append(scale)
        past = overflows[:now]
        quiet = now - 1 - max((i for i, o in enumerate(past) if o), default=-1)  # good steps just before this one
        refills = [-1]
        for i in range(now):
            good_before = i - 1 - max((j for j in range(i) if overflows[j]), default=-1)
            if not overflows[i] and (consecutive or (good_before > 0 and good_before % window == 0)):
                refills.append(i)
        spent = sum(overflows[refills[-1] + 1 : now])
        if overflows[now] and spent + 1 >= hysteresis:
            scale = max(scale / 2, least)
        elif not overflows[now] and quiet > 0 and quiet % window == 0:
            scale *= 2
    return used


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_trajectory_equals_the_rule(window: int, hysteresis: int, consecutive: bool) -> None:  # noqa: FBT001
    rng = random.Random(f"{window}{hysteresis}{consecutive}")
    for share in (0.1, 0.4):
        pattern = [rng.random() < share for _ in range(120)]
        scale = DynamicLossScale(
            initial_scale_power=200, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive
        )
        got = []
        for overflowed in pattern:
            got.append(scale.scale)
            scale.update(overflowed=overflowed)
        rule = {"power": 200, "window": window, "hysteresis": hysteresis, "consecutive": consecutive, "least": 1.0}
        assert got == scales_by_the_rule(pattern, **rule)


def test_first_doubling_and_halving() -> None:
    scale = DynamicLossScale(initial_scale_power=8, window=2, hysteresis=2)
    trajectory = []
    for overflowed in (False, False, False, False, False, True, True, True, False, False, False):
        scale.update(overflowed=overflowed)
        trajectory.append(scale.scale)
    assert trajectory == [256, 256, 512, 512, 1024, 1024, 512, 256, 256, 256, 512]


def test_the_smallest_scale_is_the_end() -> None:
    scale = DynamicLossScale(initial_scale_power=1, hysteresis=1, min_scale=1.5)
    scale.update(overflowed=True)
    assert scale.scale == 1.5
    with pytest.raises(StateError, match=r"min_loss_scale=1\.5"):
        scale.update(overflowed=True)


def test_state_goes_on_where_it_was() -> None:
    first = DynamicLossScale(initial_scale_power=4, window=3)
    for overflowed in (True, False, False, False):
        first.update(overflowed=overflowed)
    second = DynamicLossScale(initial_scale_power=9, window=3)
    second.load_state_dict(first.state_dict())
    for overflowed in (False, True, True, False):
        first.update(overflowed=overflowed)
        second.update(overflowed=overflowed)
        assert first.scale == second.scale
    with pytest.raises(ConfigError, match="greater than 0"):
        StaticLossScale(0)
    static = StaticLossScale(128.0)
    static.load_state_dict(StaticLossScale(1.0).state_dict())  # of a checkpoint of bf16: the setting stays
    assert static.scale == 128


PATTERN = [False, True, False, True, True, False, False, False, False]
FP16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 2}


def _check_scripted(rank: int, stage: int, options: dict[str, Any]) -> None:
    """One rank has the overflows; the other ranks must skip, too."""
    expected = scales_by_the_rule(PATTERN, power=6, window=2, hysteresis=2, consecutive=False, least=1.0)
    model = new_model()
    with zero_optimizer(model, stage=stage, fp16=FP16, gradient_clipping=1.0, **options) as optimizer:
        assert model.wte.weight.dtype == torch.float16
        for step, overflows in enumerate(PATTERN):
            before = full_values(model)
            assert optimizer.loss_scale.scale == expected[step]
            loss = loss_of(model, *batch(step, 0, rank))
            optimizer.scale(loss * float("inf") if overflows and rank == step % 2 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.was_step_applied != overflows
            assert (optimizer.last_grad_norm is None) == overflows
            after = full_values(model)
            assert all(value.isfinite().all() for value in after.values())
            if overflows:
                assert_same_bits(before, after)
            else:
                assert any(not torch.equal(before[name], after[name]) for name in before)
        assert optimizer.state_dict()["loss_scale"]["scale"] == optimizer.loss_scale.scale


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"quantized_gradients": True}),
        (3, {"quantized_gradients": True, "quantized_weights": True}),
        (1, {"gradient_dtype": torch.bfloat16}),
    ],
)
def test_one_ranks_overflow_is_every_ranks(stage: int, options: dict[str, Any]) -> None:
    run_ranks(2, _check_scripted, stage, options)


def _check_norm_of_scaled_gradients(rank: int, stage: int) -> None:
    """The norm of gradients 2, 2, 2, 2 is 4 at any scale, and each is clipped to 0.5.

    Without momentum, and with eps=1, Adam's first update is -g / (|g| + 1): a third. In host memory, CPUAdam's update
    includes unscaling and clipping: the norm is computed from scaled gradients.
    """
    for is_called in (False, True):
        for kind in (torch.optim.Adam, CPUAdam):
            model = torch.nn.Linear(4, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            options: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 64.0}}
            options["gradient_clipping"] = 0.0 if is_called else 1.0
            if kind is CPUAdam:
                options["offload_optimizer"] = {"device": "cpu"}
            inner = kind(model.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1.0)
            with zero_optimizer(model, inner, stage=stage, **options) as optimizer:
                optimizer.scale(model(torch.full((1, 4), 1 + 2.0 * rank, dtype=torch.float16)).sum()).backward()
                norm = optimizer.clip_grad_norm_(1.0).item() if is_called else None
                optimizer.step()
                assert (norm or optimizer.last_grad_norm) == 4.0
                assert full_values(model)["weight"].flatten().tolist() == pytest.approx([-1 / 3] * 4, rel=1e-3)


def _check_overflow_of_one_shard(rank: int, stage: int) -> None:
    """One rank alone has these elements in its shard: every rank must report the overflow before any updates."""
    numel = 2048
    for place in (0, numel - 1):
        model = torch.nn.Linear(numel, 1, bias=False)
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, fp16=FP16) as optimizer:
            x = torch.ones(1, numel, dtype=torch.float16)
            x[0, place] = float("inf") if rank == 0 else 1.0
            optimizer.scale(model(x).sum()).backward()
            shown = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            assert any(not grad.isfinite().all() for grad in shown)
            before = full_values(model)
            optimizer.step()
            assert not optimizer.was_step_applied
            assert_same_bits(before, full_values(model))


@pytest.mark.parametrize("stage", [1, 3])
def test_norms_are_unscaled_and_an_overflow_of_one_shard_is_every_ranks(stage: int) -> None:
    run_ranks(2, _check_norm_of_scaled_gradients, stage)
    run_ranks(2, _check_overflow_of_one_shard, stage)


def _train(rank: int, dtype: str, stage: int, num_micro: int) -> tuple[list[float], TinyGPT]:
    options: dict[str, Any] = {
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "bf16": {"bf16": {"enabled": True}},
        "fp32": {},
    }[dtype]
    model, losses = new_model(), []
    with zero_optimizer(model, stage=stage, gradient_clipping=0.5, **options) as optimizer:
        for step in range(8):
            for micro in range(num_micro):
                loss = loss_of(model, *batch(step % 2, micro, rank)) / num_micro
                with optimizer.scale_loss(loss) as scaled:
                    scaled.backward()
            optimizer.step()
            assert optimizer.was_step_applied
            optimizer.zero_grad()
            losses.append(loss.item() * num_micro)
    return losses, model


def _check_precisions_agree(rank: int, stage: int) -> None:
    reference, _ = _train(rank, "fp32", stage, 2)
    for dtype in ("fp16", "bf16"):
        losses, _ = _train(rank, dtype, stage, 2)
        assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.05


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_of_precisions_agree(stage: int) -> None:
    run_ranks(2, _check_precisions_agree, stage)


def _check_bf16_skips(rank: int) -> None:
    for checks in (True, False):
        model = new_model()
        bf16 = {"enabled": True, "check_grad_overflow": checks}
        with zero_optimizer(model, stage=2, bf16=bf16) as optimizer:
            (loss_of(model, *batch(0, 0, rank)) * (float("nan") if rank == 0 else 1.0)).backward()
            optimizer.step()
            assert optimizer.was_step_applied != checks
            assert all(value.isfinite().all() for value in full_values(model).values()) == checks


def test_bf16_skips_a_step_that_overflows_if_asked() -> None:
    run_ranks(2, _check_bf16_skips)


def _check_units(rank: int, stage: int) -> None:
    plain, model = new_model(), new_model(torch.float16)
    with zero_optimizer(model, stage=stage, fp16={"enabled": True, "loss_scale": 64}) as optimizer:
        optimizer.scale(loss_of(model, *batch(0, 0, rank))).backward()
        for each in range(2):
            (loss_of(plain, *batch(0, 0, each)) / 2).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            got = utils.safe_get_full_grad(ours)
            assert got is not None
            assert theirs.grad is not None
            assert (got / 64 - theirs.grad).norm() <= 0.02 * theirs.grad.norm()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_multiplied_by_the_scale_before_a_step(stage: int) -> None:
    run_ranks(2, _check_units, stage)


def _check_misuse(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=1, fp16={"enabled": True}) as optimizer:
        loss_of(model, *batch(0, 0, rank)).backward()
        with pytest.raises(StateError, match=r"engine\.backward\(loss\), or optimizer\.scale\(loss\)"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.scale(loss_of(model, *batch(0, 0, rank))).backward()
        optimizer.unscale_()
        with pytest.raises(StateError, match="unscaled already"):
            optimizer.scale(torch.ones(()))
        optimizer.zero_grad()
    model = TinyGPT(has_unused=True)
    with zero_optimizer(model, stage=2, ignore_unused_parameters=False) as optimizer:
        loss_of(model, *batch(0, 0, rank)).backward()
        with pytest.raises(StateError, match=r"2 parameters had no gradient.*unused\.weight"):
            optimizer.step()


def test_misuse_is_named() -> None:
    run_ranks(2, _check_misuse)


def _amp_steps(model: Any, optimizer: Any, batches: Any, clip: Any, rank: int) -> list[float]:
    """The loop of torch's documentation, with an overflow in step 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(6):
        loss = sum(loss_of(model, *one) for one in batches(step)) / len(batches(step))
        scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            clip()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def _check_grad_scaler(rank: int, world_size: int, stage: int) -> None:
    plain, model = new_model(), new_model()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = _amp_steps(
        plain,
        reference,
        lambda step: [batch(step, 0, r) for r in range(world_size)],
        lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
        1,
    )
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=stage) as optimizer:
        got = _amp_steps(model, optimizer, lambda step: [batch(step, 0, rank)], lambda: _clip(optimizer), rank)
        assert got == expected == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
        error = relative_error(as_vector(full_values(model).values()), as_vector(plain.parameters()))
    assert error < 1e-5


def _clip(optimizer: ZeroOptimizer) -> None:
    assert optimizer.clip_grad_norm_(0.1) > 0.1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_grad_scaler(stage: int) -> None:
    run_ranks(3, _check_grad_scaler, 3, stage)


def _check_early_end(rank: int, stage: int, how: str) -> None:
    """The data end in the first backward of a window of two, and the gradient overflows in one rank's part alone."""
    model = torch.nn.Linear(600, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with zero_optimizer(model, sgd, stage=stage, gradient_accumulation_steps=2) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for window, place in enumerate((0, 599, 0)):
            for factor in (float("inf"), 1.0):
                before, values = full_values(model)["weight"].clone(), torch.ones(1, 600)
                values[0, place] = factor
                num = 2 if factor == 1 and window == 1 else 1
                for micro in range(num):
                    if how == "boundary":
                        optimizer.is_boundary = micro == num - 1
                    scaler.scale(model(values).sum() / 2).backward()
                if how != "step":
                    scaler.unscale_(optimizer)
                if how == "unscale" and num == 1:  # refused, on both ranks alike
                    with pytest.raises(StateError, match=r"set optimizer\.is_boundary = True before the last backward"):
                        scaler.step(optimizer)
                    optimizer.zero_grad()
                    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                    continue
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                moved = before - full_values(model)["weight"]
                expected = 0.0 if factor != 1 else 1.0 if window == 1 else 0.5
                torch.testing.assert_close(moved, torch.full((1, 600), expected), rtol=0, atol=1e-6)
            assert how == "unscale" or scaler.get_scale() == 8.0 / 2 ** (window + 1)


@pytest.mark.parametrize(
    ("stage", "how"),
    [*((stage, how) for stage in (0, 1, 2, 3) for how in ("step", "boundary")), (2, "unscale"), (3, "unscale")],
)
def test_torchs_grad_scaler_where_a_window_ends_early(stage: int, how: str) -> None:
    run_ranks(2, _check_early_end, stage, how)


def _check_grad_scaler_on_empty_ranks(rank: int) -> None:
    """A model of one block of 256 elements: three of four ranks have no elements to update."""
    model = torch.nn.Linear(3, 2)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=2) as optimizer:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for factor in (1.0, float("inf")):
            before = full_values(model)
            scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            is_same = torch.equal(before["weight"], full_values(model)["weight"])
            assert is_same == (factor != 1)
        assert scaler.get_scale() == 32.0


def test_torchs_grad_scaler_where_ranks_have_nothing() -> None:
    run_ranks(4, _check_grad_scaler_on_empty_ranks)
