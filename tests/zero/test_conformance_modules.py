"""DeepSpeed behaviours that no other test asserts: how modules are built, and what they do."""

# covers zero/utils.py

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zero import Init, utils

WIDTH = 6


class Scale(nn.Module):
    """Returns its parameter in the requested form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.scale, self.form = nn.Parameter(torch.full((WIDTH,), 1.5)), form

    def forward(self) -> Any:
        if self.form == "object":
            return Holder(self.scale)
        return {"tensor": self.scale, "dict": {"inner": [self.scale]}}[self.form]


class Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Receiving(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.scale, self.first, self.form = Scale(form), nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        found = self.scale()
        scale = {"tensor": lambda: found, "dict": lambda: found["inner"][0], "object": lambda: found.value}[self.form]()
        return self.first(x) * scale


class Ancestor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.weight.data.mul_(2)


class Descendant(Ancestor):
    """Its own layer is built after its ancestor's; a third one is built by skip_init."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.first.bias.fill_(0.25)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.skipped = torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
        nn.init.ones_(self.skipped.weight)
        nn.init.zeros_(self.skipped.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.skipped(self.second(self.first(x).tanh()))


class Delegating(nn.Module):
    """Looks attributes that it lacks up in its inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Descendant()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _made_at_run_time() -> nn.Module:
    cls = type("Made", (Descendant,), {"forward": lambda self, x: self.second(self.first(x))})
    return cls()


def _attached_late() -> nn.Module:
    model = Descendant()
    model.second = nn.Linear(WIDTH, WIDTH)
    model.add_module("late", nn.Linear(3, 3))
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "ancestor": Descendant,
    "at run time": _made_at_run_time,
    "attached late": _attached_late,
    "delegating": Delegating,
    "a parameter returned": lambda: Receiving("tensor"),
    "a parameter in a dict": lambda: Receiving("dict"),
}


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def _check_modules(rank: int, name: str, num_nested: int) -> None:
    torch.manual_seed(0)
    plain = BUILDS[name]().double()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.manual_seed(0)
    with Init() if num_nested else nullcontext(), Init() if num_nested > 1 else nullcontext():
        model = BUILDS[name]().double()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3) as optimizer:
        for step in range(2):
            sum(plain(_x(step, each)).square().mean() / 2 for each in range(2)).backward()
            reference.step()
            reference.zero_grad()
            model(_x(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        got = full_values(model)
    for key, param in plain.named_parameters():
        torch.testing.assert_close(got[key], param.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_nested", [0, 1, 2], ids=["whole", "zero.Init", "zero.Init twice"])
@pytest.mark.parametrize("name", BUILDS)
def test_modules_however_they_are_made_train_as_in_a_single_process(name: str, num_nested: int) -> None:
    run_ranks(2, _check_modules, name, num_nested)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def _check_leaf_with_two_outputs(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"leaf": TwoOutputs()}).double()
    torch.manual_seed(0)
    model = nn.ModuleDict({"leaf": TwoOutputs()}).double()
    utils.set_z3_leaf_modules(model, [TwoOutputs])
    for each in range(2):
        left, right = plain["leaf"](_x(0, each))
        (left.square().mean() / 2).backward()
        (right.square().mean() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3) as optimizer:
        left, right = model["leaf"](_x(0, rank))
        left.square().mean().backward()
        right.square().mean().backward()
        optimizer.step()
        got = full_values(model)
    for key, param in plain.named_parameters():
        torch.testing.assert_close(got[key], param.detach(), rtol=1e-10, atol=1e-12)


def test_a_leaf_module_with_two_outputs() -> None:
    run_ranks(2, _check_leaf_with_two_outputs)


def _check_functional_transforms(rank: int, stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = _x(0, rank)
    transforms: list[Callable[[nn.Module], Tensor]] = [
        lambda m: torch.func.grad(lambda y: m(y).sum())(x),
        lambda m: torch.func.jacrev(m)(x[0]),
        lambda m: torch.func.vmap(m)(x),
    ]
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage):
        for transform in transforms:
            torch.testing.assert_close(transform(model), transform(plain))


@pytest.mark.parametrize("stage", [1, 2])
def test_functional_transforms_of_a_model(stage: int) -> None:
    run_ranks(2, _check_functional_transforms, stage)


def _check_secondary(rank: int, size: int) -> None:
    """With a secondary partition one gather per step crosses nodes, in training, accumulation and evaluation alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).bfloat16()
    switches = {"quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": size}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    crossed = []
    x = torch.ones(2, 64).bfloat16()
    with zero_optimizer(model, sgd, stage=3, ranks_per_node=size, **switches) as optimizer:
        for phase in ("train", "again", "evaluate", "step"):
            with zcomm.traffic() as sent:
                if phase == "evaluate":
                    with torch.no_grad():
                        model(x)
                else:
                    model(x).float().sum().backward()
                if phase == "step":
                    optimizer.step()
            crossed.append(sent.bytes(operation="all_gather", link="inter"))
        optimizer.zero_grad()
        with zcomm.traffic() as sent, torch.no_grad():
            model(x)
        crossed.append(sent.bytes(operation="all_gather", link="inter"))
    train, again, evaluate, step, after = crossed
    if size == 4:
        assert crossed == [0] * 5, "one node"
    elif size == 2:
        assert train == after > 0
        assert again == evaluate == step == 0
    else:
        assert again == step == 2 * evaluate > 0, "no secondary partition"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_secondary_partition_serves_all_gathers_after_a_steps_first(size: int) -> None:
    run_ranks(4, _check_secondary, size)
