"""DeepSpeed behaviours that no other test asserts: steps, gradients, accumulation.

docs/conformance.md has the full list, and the tests that cover it. The oracle is a single process, or arithmetic.
"""

# covers zero/utils.py

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model, train_plain
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import StateError
from zero import utils

WIDTH = 6


def _inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def _layers(num: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num))).double()


def _assert_close(got: dict[str, Tensor], plain: nn.Module) -> None:
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


class Eltwise(nn.Module):
    """Multiplies by its weight, element by element."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Products(nn.Module):
    """Has three factors; returns its results as a dict, a list, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Eltwise(value) for value in (2.0, 3.0, 5.0))

    def forward(self, x: Tensor, form: str) -> Any:
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        return {"dict": {"last": x}, "list": results[-1:], "both": {"all": [results]}}[form]


def _last(found: Any, form: str) -> Tensor:
    result: Tensor = {"dict": lambda: found["last"], "list": lambda: found[0], "both": lambda: found["all"][0][-1]}[
        form
    ]()
    return result


SWEPT: list[dict[str, Any]] = [
    {},
    {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
    {"stage3_param_persistence_threshold": 100_000, "overlap_comm": False},
    {"fp16": {"enabled": True, "initial_scale_power": 4}},
    {"bf16": {"enabled": True}, "offload_optimizer": {"device": "cpu"}},
]


def _check_analytic_values(rank: int, stage: int) -> None:
    """The mean of x over ranks is 2: the gradient of a factor is 2 times the product of the other two."""
    for options in SWEPT:
        for form in ("dict", "list", "both"):
            model = Products()
            with zero_optimizer(model, torch.optim.SGD, lr=0.25, stage=stage, **options) as optimizer:
                x = torch.full((1, WIDTH), 1.0 + 2 * rank, dtype=model.layers[0].weight.dtype)
                for clears in (True, False):
                    loss = _last(model(x, form), form).float().sum()
                    optimizer.scale(loss).backward()
                    if clears:
                        optimizer.zero_grad()
                for layer, expected in zip(model.layers, (30.0, 20.0, 12.0), strict=True):
                    gradient = utils.safe_get_full_grad(layer.weight)
                    assert gradient is not None
                    scale = 16.0 if "fp16" in options else 1.0
                    assert (gradient.float() / scale).tolist() == [expected] * WIDTH, (options, form)
                optimizer.step()
                values = full_values(model).values()
                assert [set(value.tolist()) for value in values] == [{2 - 7.5}, {3 - 5.0}, {5 - 3.0}], options


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_have_their_analytic_values_whatever_a_model_returns(stage: int) -> None:
    run_ranks(2, _check_analytic_values, stage)


def _many() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(1 + i % 7, 1 + i % 5, bias=i % 2 == 0) for i in range(60)).double()


def _many_loss(model: nn.Module, rank: int) -> Tensor:
    of_layers = [layer(torch.full((1, layer.in_features), 1.0 + rank).double()) for layer in model]
    return torch.stack([out.square().sum() for out in of_layers]).sum()


def _check_many_parameters(rank: int) -> None:
    plain = _many()
    (sum(_many_loss(plain, each) for each in range(3)) / 3).backward()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    for threshold in (0, 100_000):
        model = _many()
        options = {"stage": 3, "stage3_param_persistence_threshold": threshold}
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01), **options) as optimizer:
            _many_loss(model, rank).backward()
            optimizer.step()
            _assert_close(full_values(model), plain)


def test_many_parameters_that_divide_unevenly() -> None:
    run_ranks(3, _check_many_parameters)


def _check_step_count(rank: int, stage: int) -> None:
    model = new_model()
    with zero_optimizer(model, torch.optim.Adam(groups_of(model)), stage=stage) as optimizer:
        for count in (1, 2, 3):
            train(model, optimizer, rank, steps=1)
            counts = {utils.safe_get_full_optimizer_state(param, "step").item() for param in model.parameters()}
            assert counts == {count}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_step_count_is_the_same_in_all_groups(stage: int) -> None:
    run_ranks(2, _check_step_count, stage)


def _check_empty_group(rank: int, stage: int) -> None:
    plain, model = _layers(), _layers()
    reference = torch.optim.AdamW([{"params": list(plain.parameters())}, {"params": [], "lr": 1.0}], lr=0.1)
    adam = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [], "lr": 1.0}], lr=0.1)
    with zero_optimizer(model, adam, stage=stage) as optimizer:
        for step in range(3):
            sum(plain(_inputs(step, each)).square().mean() / 2 for each in range(2)).backward()
            reference.step()
            reference.zero_grad()
            model(_inputs(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]
        _assert_close(full_values(model), plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_group_may_be_empty(stage: int) -> None:
    run_ranks(2, _check_empty_group, stage)


def _check_nothing_stays_gathered(rank: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=3, stage3_param_persistence_threshold=0) as optimizer:
        for is_training in (True, False, True):
            model.train(is_training)
            if is_training:
                train(model, optimizer, rank, steps=1)
            else:
                with torch.no_grad():
                    loss_of(model, *batch(0, 0, rank))
            for param in model.parameters():
                with pytest.raises(StateError, match="is released"):
                    param.sum()


def test_no_parameter_stays_gathered_after_training_or_evaluation() -> None:
    run_ranks(2, _check_nothing_stays_gathered)


def _check_deferred(rank: int, stage: int) -> None:
    """Gradients are whole numbers: sums are exact in any order, so both ways must agree in every bit."""
    results, calls = [], []
    for defers in (False, True):
        model = Products()
        sgd = torch.optim.SGD(model.parameters(), lr=2.0**-6)
        with zero_optimizer(model, sgd, stage=stage, gradient_accumulation_steps=1) as optimizer:
            with zcomm.traffic() as sent:
                for micro in range(4):
                    optimizer.is_boundary = micro == 3
                    x = torch.full((1, WIDTH), 1.0 + micro + 2 * rank)
                    if defers and micro < 3:
                        with optimizer.no_sync():
                            model(x, "dict")["last"].sum().backward()
                    else:
                        model(x, "dict")["last"].sum().backward()
            calls.append(sent.calls(operation="reduce_scatter"))
            assert optimizer.clip_grad_norm_(100.0).item() > 100
            optimizer.step()
            results.append(full_values(model))
    assert_same_bits(*results)
    assert calls[0] == 4 * calls[1] > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_reductions_that_are_put_off_are_fewer_and_have_the_same_bits(stage: int) -> None:
    run_ranks(2, _check_deferred, stage)


def _check_step_inside_no_sync(rank: int) -> None:
    """DeepSpeed raises here; zero's step reduces the deferred gradients as it does outside of no_sync."""
    results = []
    for inside in (False, True):
        model = new_model()
        with zero_optimizer(model, stage=2) as optimizer:
            if inside:
                with optimizer.no_sync():
                    loss_of(model, *batch(0, 0, rank)).backward()
                    optimizer.step()
            else:
                loss_of(model, *batch(0, 0, rank)).backward()
                optimizer.step()
            results.append(full_values(model))
    assert_same_bits(*results)


def test_a_step_inside_no_sync_averages_what_was_held_back() -> None:
    run_ranks(2, _check_step_inside_no_sync)


def _check_tensor_backward(rank: int, stage: int) -> None:
    plain, model = _layers(), _layers()
    weights = torch.arange(4.0 * WIDTH).view(4, WIDTH).double()
    for each in range(2):
        plain(_inputs(0, each)).backward(weights / 2)
    torch.optim.SGD(plain.parameters(), lr=1e-3).step()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3), stage=stage) as optimizer:
        out = model(_inputs(0, rank))
        out.backward(weights)
        optimizer.step()
        _assert_close(full_values(model), plain)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_of_a_tensor_with_its_gradient(stage: int) -> None:
    run_ranks(2, _check_tensor_backward, stage)


def _check_joint_loss(rank: int, stage: int) -> None:
    def joint(first: Any, second: Any, step: int, which: int) -> Tensor:
        loss: Tensor = (first(_inputs(step, which)) * second(_inputs(step + 50, which))).square().mean()
        return loss

    plain = [_layers(), _layers(2)]
    reference = [torch.optim.SGD(each.parameters(), lr=0.1) for each in plain]
    models = [_layers(), _layers(2)]
    engines = [
        zero.initialize(
            model=model,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            config={"zero_optimization": {"stage": stage}},
        ).engine
        for model in models
    ]
    for step in range(3):
        sum(joint(*plain, step, which) / 2 for which in range(2)).backward()
        for each in reference:
            each.step()
            each.zero_grad()
        joint(*engines, step, rank).backward()
        for engine in engines:
            engine.step()
    for engine, model, expected in zip(engines, models, plain, strict=True):
        _assert_close(full_values(model), expected)
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_several_engines_share_a_loss(stage: int) -> None:
    run_ranks(2, _check_joint_loss, stage)


def _check_unmanaged(rank: int, folder: str) -> None:
    """Where the caller marks the boundaries: the bits are those of counted boundaries, wherever states are stored."""
    for device in ("none", "cpu", "nvme"):
        for stage in (2, 3) if device != "none" else (1, 2, 3):
            results = []
            for is_managed in (True, False):
                offload = {"device": device, "nvme_path": folder} if device == "nvme" else {"device": device}
                config: dict[str, Any] = {
                    "zero_optimization": {"stage": stage, "offload_optimizer": offload},
                    "managed_gradient_accumulation": is_managed,
                    "gradient_clipping": 0.5,
                }
                if is_managed:
                    config["gradient_accumulation_steps"] = 4
                model = new_model()
                adam = zero.CPUAdam(groups_of(model), lr=1e-2)
                engine = zero.initialize(model=model, optimizer=adam, config=config).engine
                for step in range(2):
                    for micro in range(4):
                        loss = loss_of(engine, *batch(step, micro, rank))
                        if not is_managed:
                            engine.set_gradient_accumulation_boundary(micro == 3)
                            loss = loss / 4
                        engine.backward(loss)
                        engine.step()
                results.append(full_values(model))
                engine.destroy()
            assert_same_bits(*results)


def test_unmanaged_accumulation_has_the_bits_of_managed_wherever_states_rest(tmp_path: Path) -> None:
    run_ranks(2, _check_unmanaged, str(tmp_path))


def _check_eager_save_and_load(rank: int, folder: str) -> None:
    """Save before the first step and load at once: training equals that of a run which was never saved."""
    plain = new_model()
    train_plain(plain, torch.optim.AdamW(groups_of(plain), lr=1e-2), world_size=2, steps=2)
    for stage in (1, 3):
        model = new_model()
        with zero_optimizer(model, stage=stage) as optimizer:
            zero.save_checkpoint(optimizer, folder, f"stage{stage}")
            with torch.no_grad(), zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
                for param in model.parameters():
                    param.zero_()
            zero.load_checkpoint(optimizer, folder, f"stage{stage}")
            train(model, optimizer, rank, steps=2)
            got = full_values(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(got[name], param.detach(), rtol=1e-4, atol=1e-5)


def test_a_model_is_saved_and_loaded_before_its_first_step(tmp_path: Path) -> None:
    run_ranks(2, _check_eager_save_and_load, str(tmp_path))


def _check_not_loading_states(rank: int, folder: str) -> None:
    model = new_model()
    with zero_optimizer(model, stage=2) as optimizer:
        train(model, optimizer, rank, steps=2)
        zero.save_checkpoint(optimizer, folder, "two")
        trained = full_values(model)
    results = []
    for is_fresh in (True, False):
        model = new_model(seed=4)
        if is_fresh:
            model.load_state_dict({**copy.deepcopy(trained), "head.weight": trained["wte.weight"]})
        with zero_optimizer(model, stage=2) as optimizer:
            if not is_fresh:
                zero.load_checkpoint(optimizer, folder, "two", load_optimizer_states=False)
            train(model, optimizer, rank, steps=2)
            results.append(full_values(model))
    assert_same_bits(*results)


def test_weights_without_optimizer_states_train_as_a_fresh_model_with_them(tmp_path: Path) -> None:
    run_ranks(2, _check_not_loading_states, str(tmp_path))
