"""Moments in blocks of int8: what a step does with them, how far they are off, where they rest, and that they train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import ConfigError, StateError
from zero.cpu_optimizer import CPUOptimizer
from zero.moments import Blocks
from zero.tiers.moved import moved

NUMEL = 5003
MAKE: dict[str, Callable[[Any, str], CPUOptimizer]] = {
    "adam": lambda p, name: zero.CPUAdam(p, 1e-2, moment_format=name, weight_decay=0.1),
    "amsgrad": lambda p, name: zero.CPUAdam(p, 1e-2, moment_format=name, amsgrad=True),
    "adagrad": lambda p, name: zero.CPUAdagrad(p, 1e-2, moment_format=name, initial_accumulator_value=0.1),
    "lion": lambda p, name: zero.CPULion(p, 1e-3, moment_format=name),
}
SQUARES = ("exp_avg_sq", "sum")


def _grad(step: int) -> Tensor:
    """Of very different sizes in one block, and some zeros."""
    drawn = torch.Generator().manual_seed(step)
    sizes = torch.exp2(-20 * torch.rand(NUMEL, generator=torch.Generator().manual_seed(99)))
    return torch.randn(NUMEL, generator=drawn) * sizes * (torch.arange(NUMEL) % 7 > 0)


def _step(values: Tensor, *, is_square: bool) -> Tensor:
    """The distance of the levels around each value, or around its root: from the words of the format."""
    y = (values.double().sqrt() if is_square else values.double().abs()).view(-1, 256)
    levels, largest = (255, y.amax(1, True)) if is_square else (127, y.amax(1, True))
    lower = (levels * (y / largest).sqrt() * (1 - 1e-6)).floor()
    return ((2 * lower + 1) / levels**2 * largest).flatten()


@pytest.mark.parametrize("name", MAKE)
def test_a_step_is_the_float32_step_of_what_the_records_hold(name: str) -> None:
    """Bit for bit, by any number of threads; what is kept lies within a level, and 0 only where it is 0."""
    torch.manual_seed(0)
    start, threads = torch.randn(NUMEL), torch.get_num_threads()
    p, q, one = (nn.Parameter(start.clone()) for _ in range(3))
    narrow, wide, alone = MAKE[name]([p], "int8"), MAKE[name]([q], "float32"), MAKE[name]([one], "int8")
    for step in range(5):
        p.grad, q.grad, one.grad = (_grad(step) for _ in range(3))
        torch.set_num_threads(3)
        narrow.step()
        torch.set_num_threads(1)
        alone.step()
        torch.set_num_threads(threads)
        wide.step()
        assert torch.equal(p, q)
        assert torch.equal(p, one)
        for moment in narrow.moments:
            is_square = moment in SQUARES
            records, exact = narrow.state[p][moment], wide.state[q][moment]
            assert torch.equal(records, alone.state[one][moment])
            assert records.numel() == math.ceil(NUMEL / 256) * 260
            held = Blocks(is_square).decode(records, 0, NUMEL)
            padded = nn.functional.pad(exact, (0, -NUMEL % 256))
            error = (held.double().sqrt() - exact.double().sqrt()) if is_square else held.double() - exact
            assert (error.abs() <= _step(padded, is_square=is_square)[:NUMEL] * (1 + 1e-4)).all()
            assert torch.equal(held == 0, exact == 0) or not is_square
            assert torch.equal(Blocks(is_square).encode(held), records), "encoded again they are the same"
            assert torch.equal(Blocks(is_square).decode(records, 300, 700), held[300:700])
            exact.copy_(held)


def test_formats_are_taken_over_from_one_another() -> None:
    states = {}
    for name in ("float32", "bfloat16", "int8"):
        p = nn.Parameter(torch.ones(NUMEL))
        optimizer = MAKE["adam"]([p], name)
        p.grad = _grad(0)
        optimizer.step()
        states[name] = optimizer.state_dict()
    for saved, state in states.items():
        for name in states:
            p = nn.Parameter(torch.ones(NUMEL))
            optimizer = MAKE["adam"]([p], name)
            optimizer.load_state_dict(state)
            if saved == name:
                for key, value in state["state"][0].items():
                    assert torch.equal(optimizer.state[p][key], value)
            moment = optimizer.layout_of("exp_avg").decode(optimizer.state[p]["exp_avg"], 0, NUMEL).float()
            assert (moment - 0.1 * _grad(0)).abs().max() < 0.01 * _grad(0).abs().max()
    with pytest.raises(StateError, match="before the first step"):
        optimizer.set_moment_format("float32")
    with pytest.raises(ConfigError, match=r"int4"):
        zero.CPUAdam([nn.Parameter(torch.ones(3))], moment_format="int4")


def test_int8_moments_train_as_well() -> None:
    """A noisy quadratic whose elements differ a thousandfold in scale: the second moment moves by less than a level."""
    torch.manual_seed(0)
    numel, ends, second = 4096, {}, {}
    target, scale = torch.randn(numel), torch.logspace(-3, 0, 16).repeat(numel // 16)
    for name in ("float32", "int8"):
        p = nn.Parameter(torch.zeros(numel))
        optimizer = zero.CPUAdam([p], 0.01, moment_format=name)
        for step in range(400):
            noise = torch.randn(numel, generator=torch.Generator().manual_seed(step))
            p.grad = scale * (p.detach() - target + noise)
            optimizer.step()
        ends[name] = (p - target).square().mean().item()
        moment = optimizer.layout_of("exp_avg_sq").decode(optimizer.state[p]["exp_avg_sq"], 0, numel)
        second[name] = (moment / scale.square()).mean().item()
    assert abs(second["int8"] - second["float32"]) < 0.05 * second["float32"]
    assert abs(ends["int8"] - ends["float32"]) < 0.1 * ends["float32"]


def _offload(device: str, folder: str) -> dict[str, Any]:
    return {"offload_optimizer": {"device": device, "nvme_path": folder}, "sub_group_size": 1601}


def _states(model: nn.Module) -> dict[str, Tensor]:
    names = ("exp_avg", "exp_avg_sq")
    found = {(n, k): zero.utils.safe_get_full_optimizer_state(p, k) for n, p in model.named_parameters() for k in names}
    return {f"{name} {key}": value for (name, key), value in found.items()}


def _train(rank: int, model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        loss_of(model, *batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_save(rank: int, folder: str) -> None:
    """From files; with as many ranks the run goes on in its bits, wherever states rest."""
    options = {"lr": 1e-2, "moment_format": "int8", "stage": 2}
    for saved, loaded in (("nvme", "cpu"), ("cpu", "nvme")):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, zero.CPUAdam, **options, **_offload(saved, folder)) as optimizer:
            assert "moments rest in int8" in str(optimizer.effective)
            _train(rank, model, optimizer, range(2))
            zero.save_checkpoint(optimizer, f"{folder}/{saved}", "two", async_op=True)
            states = _states(model)
            _train(rank, model, optimizer, range(2, 4))
            expected = full_values(model) | _states(model)
        model = new_model(torch.bfloat16, seed=1)
        with zero_optimizer(model, zero.CPUAdam, **options, **_offload(loaded, folder)) as optimizer:
            zero.load_checkpoint(optimizer, f"{folder}/{saved}")
            assert_same_bits(_states(model), states)
            _train(rank, model, optimizer, range(2, 4))
            assert_same_bits(full_values(model) | _states(model), expected)
            weight = model.head.weight
            values = torch.linspace(0, 1, weight.numel()).view_as(weight)
            zero.utils.safe_set_full_optimizer_state(weight, values, "exp_avg_sq")
            got = zero.utils.safe_get_full_optimizer_state(weight, "exp_avg_sq")
            assert (got.sqrt() - values.sqrt()).abs().max() <= 1 / 255
            assert_same_bits({"": got > 0}, {"": values > 0})
    if rank == 0:
        torch.save(states, f"{folder}/states.pt")


def _check_load(rank: int, folder: str) -> None:
    """On other ranks, blocks hold the same elements: the same values."""
    states = torch.load(f"{folder}/states.pt")
    for name in ("int8", "float32"):
        for device in ("none", "nvme"):
            model = new_model(torch.bfloat16, seed=1)
            options = {"lr": 1e-2, "stage": 3, "moment_format": name, **_offload(device, folder)}
            with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
                zero.load_checkpoint(optimizer, f"{folder}/cpu")
                assert_same_bits(_states(model), states)


def test_checkpoints_with_int8_moments(tmp_path: Path) -> None:
    run_ranks(2, _check_save, str(tmp_path))
    run_ranks(4, _check_load, str(tmp_path))


def _check_bytes(rank: int, folder: str) -> None:
    """A step reads and writes about half the bytes; float32 masters are 4 of them."""
    found = {}
    for name in ("float32", "bfloat16", "int8"):
        torch.manual_seed(0)
        model = nn.Linear(512, 512, bias=False)
        options = {"lr": 1e-2, "stage": 1, "moment_format": name, "bf16": {"enabled": True}, **_offload("nvme", folder)}
        with zero_optimizer(model, zero.CPUAdam, **options | {"sub_group_size": 2**20}) as optimizer:
            model(torch.ones(1, 512, dtype=torch.bfloat16) * rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(1, 512, dtype=torch.bfloat16) * rank).sum().backward()
            with moved() as window:
                optimizer.step()
            numel = 512 * 512 / 2
            found[name] = [window.bytes(kind="states", link=link) / numel for link in ("read", "write")]
            assert optimizer.memory().states_in_files == 2 * found[name][0] * numel
    assert found["float32"] == [12, 12]
    assert found["bfloat16"] == [8, 8]
    assert found["int8"] == [pytest.approx(4 + 2 * 260 / 256, rel=0.01)] * 2


def test_bytes_of_a_step_on_files(tmp_path: Path) -> None:
    run_ranks(2, _check_bytes, str(tmp_path))


def _check_training(rank: int) -> None:
    ends = {}
    for name in ("float32", "int8"):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=3e-3, stage=2, moment_format=name) as optimizer:
            _train(rank, model, optimizer, [step % 4 for step in range(100)])
            with zero.GatheredParameters(model.parameters()), torch.no_grad():
                ends[name] = sum(loss_of(model, *batch(step, 0, rank)).item() for step in range(4)) / 4
    assert ends["float32"] < 2, (ends, "about 3.6 at the start")
    assert abs(ends["int8"] - ends["float32"]) < 0.1
    with pytest.raises(ConfigError, match=r"moment_format=.int8.*AdamW"):
        zero.ZeroOptimizer(new_model(), torch.optim.AdamW, moment_format="int8", lr=1e-3)


def test_a_model_trains_as_well() -> None:
    run_ranks(2, _check_training)
