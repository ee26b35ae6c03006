"""Which optimizers are accepted: elements or tensors that affect each other are found, others pass."""

# covers zero/_optim/elementwise_check.py zero/_optim/lion.py

# ruff: noqa: ARG002  (what changes a gradient is given all there is)
from __future__ import annotations

import inspect
import math
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

import zero
from tests.ranks import run_ranks
from tests.zero.models import as_vector, groups_of, new_model, relative_error, train_plain
from tests.zero.training import full_values, train, zero_optimizer
from zcomm import ConfigError, StateError
from zero._optim import elementwise_check
from zero._optim.elementwise_check import check_elementwise
from zero._optim.lion import Lion

CPU = torch.device("cpu")
REFUSED_OF_TORCH = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}
OF_TORCH = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
}


class Changing(Optimizer):
    """SGD whose gradient ``change`` replaces, in the optimizer's own way."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "is_on": True, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
        grads = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        for group in self.param_groups:
            for param in group["params"]:
                if param in grads:
                    grad = grads[param]
                    update = self.change(grad, param, group, grads) if group["is_on"] else grad
                    param.sub_(update, alpha=group["lr"])

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        raise NotImplementedError


class ByNormOfAll(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad / torch.stack([g.norm() for g in grads.values()]).norm()


class Clipped(Changing):
    """Changes gradients only if their common norm is large."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad * min(1.0, 1e4 / float(torch.stack([g.norm() for g in grads.values()]).norm()))


class Raised(Changing):
    """Changes gradients only if their common norm is small."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad * max(1.0, 1e-1 / float(grad.norm() + 1e-12))


class TrustRatio(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad * (param.norm() / (grad.norm() + 1e-12))


class BySize(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad / math.sqrt(grad.numel())


class ByOtherGroups(Changing):
    """The tensors of a group do not affect each other."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        others = [p for other in self.param_groups if other is not group for p in other["params"] if p in grads]
        return grad * (1 + sum(grads[p].square().sum() for p in others)) ** 0.5


class ByNumberOfTensors(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad / len(grads)


class Factored(Changing):
    """Factors matrices whose sides are at least 128."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        if grad.ndim == 2 and min(grad.shape) >= group.get("min_dim_size_to_factor", 128):
            return grad / (grad.square().mean(1, keepdim=True) + 1e-12).sqrt()
        return grad


class FactoredFrom300(Factored):
    def __init__(self, params: Iterable[Any], lr: float = 0.1, min_dim_size_to_factor: int = 300) -> None:
        super().__init__(params, lr, min_dim_size_to_factor=min_dim_size_to_factor)


class Orthogonal(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return torch.linalg.qr(grad)[0] if grad.ndim == 2 and grad.shape[0] >= grad.shape[1] else grad


class OfKernels(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad - grad.mean((1, 2, 3), keepdim=True) if grad.ndim == 4 else grad


class MeanMomentum(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(grad))
        return grad + momentum.lerp_(grad, 0.1).mean()


class Whitened(Changing):
    """Multiplies by a matrix over all elements of a tensor."""

    largest = 0

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        type(self).largest = max(self.largest, grad.numel())
        flat = grad.flatten()
        covariance = torch.eye(flat.numel(), dtype=flat.dtype) + torch.outer(flat, flat)
        return torch.linalg.solve(covariance, flat).view_as(grad)


class Late(Changing):
    """Couples elements after some steps, which ``counter`` counts."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        steps = state["step"] if group["counter"] == "state" else group["count"]
        return grad / (grad.norm() + 1e-12) if steps > group["after"] else grad


class Periodic(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad / (grad.norm() + 1e-12) if group["count"] % group["period"] == 0 else grad


class Noisy(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad + torch.randn_like(grad)


class Coin(Changing):
    """Draws from Python's generator: one number for all elements of a rank, another on the next rank."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad * random.random()


class Replacing(Changing):
    """Replaces the parameter's memory, of which a master is a view."""

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        param.data = param - group["lr"] * grad
        return torch.zeros_like(grad)


class Standing(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return torch.zeros_like(grad)


class WithDeque(Changing):
    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        self.state[param].setdefault("grads", deque(maxlen=2)).append(grad)
        return grad


class WithAttribute(Changing):
    rate = 1.0

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        self.rate = 1 / group["count"]
        return grad * self.rate


class Wrapper(Optimizer):
    """Has state of its own, and none of the optimizer that it wraps."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, dict(base.defaults))
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


COUPLED: dict[str, tuple[type[Changing], dict[str, Any], str]] = {
    "norm of all gradients": (ByNormOfAll, {}, "depends on other tensors of the group"),
    "large gradients only": (Clipped, {}, "depends on other tensors of the group"),
    "small gradients only": (Raised, {}, "depends on other elements"),
    "trust ratio": (TrustRatio, {}, "depends on other elements of the tensor"),
    "size of the tensor": (BySize, {}, "depends on other elements of the tensor"),
    "other groups": (ByOtherGroups, {}, "is not elementwise"),
    "number of tensors": (ByNumberOfTensors, {}, "is not elementwise"),
    "factored from 128": (Factored, {}, "vector and as a matrix"),
    "factored from 300": (Factored, {"min_dim_size_to_factor": 300}, "vector and as a matrix"),
    "factored from 300 by default": (FactoredFrom300, {}, "vector and as a matrix"),
    "orthogonal": (Orthogonal, {}, "vector and as a matrix"),
    "kernels": (OfKernels, {}, "vector and as a matrix"),
    "mean of the momentum": (MeanMomentum, {}, "depends on other elements of the tensor"),
    "after 3 steps": (Late, {"counter": "state", "after": 3}, "depends on other elements"),
    "after 500 steps of the state": (Late, {"counter": "state", "after": 500}, "depends on other elements"),
    "after 500 steps of the group": (Late, {"counter": "group", "after": 500}, "depends on other elements"),
    "each 200 steps": (Periodic, {"period": 200}, "depends on other elements"),
    "noise": (Noisy, {}, "draws random numbers"),
    "coin": (Coin, {}, "draws random numbers"),
    "replaced memory": (Replacing, {}, "moved no parameter"),
    "nothing": (Standing, {}, "moved no parameter of group 0"),
    "deque": (WithDeque, {}, "keeps 'grads' .* as a deque: a checkpoint holds"),
    "attribute": (WithAttribute, {}, "keeps 'rate', which steps change, outside of its state"),
}


def _two_groups(cls: type[Changing], settings: dict[str, Any], *, is_first: bool) -> Optimizer:
    """Only one of two groups has the coupling."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    groups = [
        {"params": list(part.parameters()), "is_on": on} for part, on in zip(model, (is_first, True), strict=True)
    ]
    return cls(groups, **settings)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", COUPLED)
def test_a_coupling_is_found_in_whatever_group(name: str, is_first: bool) -> None:  # noqa: FBT001
    cls, settings, text = COUPLED[name]
    if cls in (Replacing, Standing) and not is_first:
        text = "moved no parameter of group 1"
    with pytest.raises(ConfigError, match=f"^{cls.__name__} .*{text}.*use an elementwise optimizer"):
        check_elementwise(_two_groups(cls, settings, is_first=is_first), {}, CPU)


@pytest.mark.parametrize("cls", [ByOtherGroups, TrustRatio])
def test_one_of_many_groups_is_tried_beside_others_in_little_memory(
    cls: type[Changing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of one of many groups, each with its own settings, must not take memory for all of them."""
    sizes, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda numel, **options: sizes.append(numel) or randn(numel, **options))
    for place in (3, 16, 39):
        groups = [{"params": [nn.Parameter(torch.zeros(2))], "is_on": i == place, "own": i} for i in range(40)]
        with pytest.raises(ConfigError, match=f"^{cls.__name__} .*in parameter group {place} is"):
            check_elementwise(cls(groups), {}, CPU)
    check_elementwise(cls([{**group, "is_on": False} for group in groups]), {}, CPU)
    assert max(sizes) < 16 * 22_000


def test_what_would_take_hours_for_a_large_tensor_is_found_with_small_ones() -> None:
    """Like Shampoo, which needs a matrix of 3 GB for 20,736 elements."""
    with pytest.raises(ConfigError, match="depends on other elements"):
        check_elementwise(_two_groups(Whitened, {}, is_first=True), {}, CPU)
    assert 0 < Whitened.largest < 1000


@pytest.mark.parametrize("name", sorted(set(COUPLED) - {"other groups"}))
def test_a_class_is_tried_as_an_instance_is(name: str) -> None:
    cls, settings, _ = COUPLED[name]
    with pytest.raises(ConfigError, match=f"^{cls.__name__} "):
        check_elementwise(cls, settings, CPU)


@pytest.mark.parametrize("name", sorted(OF_TORCH))
def test_torchs_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried even where the class is known. test_optimizer.py and tools/optimizers.py train the accepted ones."""
    monkeypatch.setattr(elementwise_check, "KNOWN", frozenset())
    model = nn.Linear(3, 2, bias=False)
    for optimizer, options in ((OF_TORCH[name](model.parameters(), lr=0.1), {}), (OF_TORCH[name], {"lr": 0.1})):
        if name in REFUSED_OF_TORCH:
            with pytest.raises(ConfigError, match=f"^{name} "):
                check_elementwise(optimizer, options, CPU)
        else:
            check_elementwise(optimizer, options, CPU)


def test_what_is_not_tried_is_one_of_those_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {cls for name, cls in OF_TORCH.items() if name not in REFUSED_OF_TORCH}
    assert tried | {Lion} >= elementwise_check.KNOWN
    monkeypatch.setattr(elementwise_check, "KNOWN", frozenset())
    check_elementwise(Lion, {"lr": 0.1}, CPU)


def _by_norm(optimizer: Optimizer, *_: Any) -> None:
    """Divides by the norm of all gradients."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if grads:
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)


class ByNorm(SGD):
    """A subclass of a known optimizer."""

    def step(self, closure: Any = None) -> None:
        _by_norm(self)
        super().step(closure)


def test_what_is_done_to_a_known_optimizer_is_tried() -> None:
    hooked = SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    hooked.register_step_pre_hook(_by_norm)
    for optimizer in (hooked, ByNorm(nn.Linear(3, 2).parameters(), lr=0.1), ByNorm):
        with pytest.raises(ConfigError, match="is not elementwise"):
            check_elementwise(optimizer, {"lr": 0.1}, CPU)


def test_learning_rates_of_zero_hide_nothing() -> None:
    for lr in (0.0, torch.tensor(0.0)):
        with pytest.raises(ConfigError, match="depends on other elements"):
            check_elementwise(_two_groups(TrustRatio, {"lr": lr}, is_first=True), {}, CPU)


def test_a_wrapper_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Wrapper .*it steps another optimizer, 'base'"):
        check_elementwise(Wrapper(SGD(nn.Linear(2, 2).parameters(), lr=0.1)), {}, CPU)


class ByPastCalls(Changing):
    """Elementwise; its trial must leave the count of calls unchanged."""

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.calls: dict[str, list[int]] = {"calls": []}
        self.generator = random.Random(0)

    def change(self, grad: Tensor, param: Tensor, group: dict[str, Any], grads: dict[Tensor, Tensor]) -> Tensor:
        return grad * self.generator.random()


def test_a_trial_leaves_everything_as_it_was() -> None:
    model = nn.Linear(4, 3)
    optimizer = ByPastCalls(model.parameters(), rate=torch.ones(1))
    model(torch.ones(1, 4)).sum().backward()
    values = [p.detach().clone() for p in model.parameters()]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    drawn = optimizer.generator.getstate(), random.getstate(), torch.get_rng_state()
    with pytest.raises(ConfigError, match="is not elementwise"):  # each tensor takes the next number
        check_elementwise(optimizer, {}, CPU)
    assert optimizer.generator.getstate() == drawn[0]
    assert random.getstate() == drawn[1]
    assert torch.equal(torch.get_rng_state(), drawn[2])
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == settings
    assert not optimizer.state
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


class Remembering(Adagrad):
    """Cannot be constructed from parameter groups alone."""

    def __init__(self, name: str, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.name = name


def test_state_of_steps_is_told_from_a_constructors() -> None:
    model = new_model()
    for lr_decay in (0.0, 0.1):
        fresh = Adagrad(model.parameters(), lr=0.1, lr_decay=lr_decay, initial_accumulator_value=0.5)
        zero.ZeroOptimizer(model, fresh).close()
    stepped = Adagrad(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    stepped.step()  # no parameter has moved, but steps are counted
    with pytest.raises(StateError, match=r"Adagrad has state .* its constructor makes another"):
        zero.ZeroOptimizer(model, stepped)
    with pytest.raises(StateError, match=r"Remembering has state .* cannot be checked"):
        zero.ZeroOptimizer(model, Remembering("x", model.parameters()))


def _check_instance(rank: int, kind: str, stage: int) -> None:
    """State that a constructor makes, float64, compared with one process; through the JSON as well."""
    model, plain = new_model(torch.float64), new_model(torch.float64)
    cls, options = (Adagrad, {"initial_accumulator_value": 0.3}) if kind == "Adagrad" else (zero.Lion, {})
    train_plain(plain, cls(groups_of(plain), lr=1e-2, **options), world_size=2, steps=4)
    with zero_optimizer(model, cls(groups_of(model), lr=1e-2, **options), stage=stage) as optimizer:
        assert all(value.ndim in (0, 1) for state in optimizer.state.values() for value in state.values())
        train(model, optimizer, rank, steps=4)
        got = as_vector(full_values(model).values())
    assert relative_error(got, as_vector(plain.parameters())) < 1e-10


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["Adagrad", "Lion"])
def test_an_instance_trains_as_one_process_does(kind: str, stage: int) -> None:
    run_ranks(2, _check_instance, kind, stage)


def _check_json(rank: int, kind: str, offload: bool) -> None:  # noqa: FBT001
    model = new_model()
    stage = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 1e-2}},
        "zero_optimization": stage,
    }
    engine, optimizer, *_ = zero.initialize(model=model, config=config)
    plain = new_model()
    reference = {"Adagrad": Adagrad, "Lion": zero.CPULion}[kind](plain.parameters(), lr=1e-2)
    train_plain(plain, reference, world_size=2, steps=3)
    train(model, optimizer, rank, steps=3)
    assert relative_error(as_vector(full_values(model).values()), as_vector(plain.parameters())) < 1e-5
    engine.destroy()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["Adagrad", "Lion"])
def test_the_json_has_optimizers_whose_constructors_make_state(kind: str, offload: bool) -> None:  # noqa: FBT001
    run_ranks(2, _check_json, kind, offload)
