"""Unusual models: odd parameters, double backward, checkpointing from outside, users' own hooks."""

# covers triton_kernels/codecs.py

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import LayoutError
from zero import GatheredParameters, ZeroOptimizer
from zero._gather.gatherer import Gatherer
from zero._sharding.bucket import Bucket

Loss = Callable[[nn.Module, Tensor], Tensor]
WIDTH = 6


class OddParameters(nn.Module):
    """A scalar, an empty parameter, and lists and dicts of parameters, all used by the root's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])
        self.biases = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weights[0] @ self.weights[1] + self.biases["a"]
        return self.layer(x) * self.scale + self.nothing.sum()


class CheckpointedLayers(nn.Module):
    """Backward starts by recomputing the last layer, which no other layer follows."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer.__call__, x, use_reentrant=self.use_reentrant)
        return x


class SavingItself(nn.Module):
    """Its own hooks, inside the library's, store unchanged what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = new_mlp()

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.inner(x)


def new_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def validated_in_inference_mode(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        model(x.clone())
    return mean_square(model, x)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x.requires_grad_())
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return gradient.square().sum() + output.sum()


def checkpointed_from_outside(model: nn.Module, x: Tensor) -> Tensor:
    hidden = checkpoint(lambda y: model[1](model[0](y)), x, use_reentrant=False)
    return model[4](checkpoint(lambda y: model[3](model[2](y)), hidden, use_reentrant=False)).square().mean()


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def check_equals_plain_training(rank: int, build: Callable[[], nn.Module], loss: Loss, stage: int) -> None:
    """Two steps of SGD; the oracle is one process on both ranks' inputs."""
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    model = build().double()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for step in range(2):
            for other in range(2):
                (loss(plain, inputs(step, other)) / 2).backward()
            reference.step()
            reference.zero_grad()
            loss(model, inputs(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = full_values(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "odd parameters": (OddParameters, mean_square),
    "validation in inference mode": (new_mlp, validated_in_inference_mode),
    "gradient penalty": (new_mlp, gradient_penalty),
    "checkpointed from outside": (new_mlp, checkpointed_from_outside),
    "checkpointed layers": (partial(CheckpointedLayers, use_reentrant=False), mean_square),
    "checkpointed layers, reentrant": (
        partial(CheckpointedLayers, use_reentrant=True),
        lambda model, x: mean_square(model, x.requires_grad_()),
    ),
    "hooks on saved tensors inside": (SavingItself, mean_square),
}


def _check_case(rank: int, name: str, stage: int) -> None:
    check_equals_plain_training(rank, *CASES[name], stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_training(name: str, stage: int) -> None:
    run_ranks(2, _check_case, name, stage)


def test_frozen_integers() -> None:
    """Quantized base models have such parameters; here with one rank."""
    for stage in (0, 1, 2, 3):
        model = nn.Linear(3, 2)
        model.codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        options = {"stage": stage, "lr": 0.1, "quantized_weights": True}
        if stage == 3:
            with pytest.raises(LayoutError, match=r"'codes' is torch\.uint8; use stage 1 or 2"):
                ZeroOptimizer(model, torch.optim.SGD, **options)
            continue
        optimizer = ZeroOptimizer(model, torch.optim.SGD, **options)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert model.codes.tolist() == [0, 1, 2, 3, 4]


def test_hooks_around_the_forward_see_what_is_saved() -> None:
    """Hooks like those of ``save_on_cpu`` receive activations, not views of a bucket."""
    model = new_mlp()
    with zero_optimizer_of_one(model) as optimizer:
        packed: list[Tensor] = []
        with saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, lambda i: packed[i]):
            loss = mean_square(model, inputs(0, 0).float())
        assert packed
        assert not {t.data_ptr() for t in packed} & {b.data_ptr() for b in optimizer._runtime.pool._owned.values()}
        loss.backward()
        optimizer.step()


class _Noted(nn.Module):
    """A block, which is a unit, with a user's hooks around a module within it."""

    packed: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        with saved_tensors_hooks(lambda t: self.packed.append(t) or len(self.packed) - 1, lambda i: self.packed[i]):
            return x + self.second(x)


def test_a_module_within_its_unit_gathers_nothing_and_hides_its_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Noted() for _ in range(3)))
    plain, acquired = copy.deepcopy(model), Counter[str]()
    x = inputs(0, 0).float()
    with zero_optimizer_of_one(model) as optimizer:
        acquire = Gatherer.acquire

        def counted(self: Gatherer, bucket: Bucket, mode: Any = None) -> None:
            acquired[bucket.name] += 1
            acquire(self, bucket, mode)

        mean_square(model, x)
        _Noted.packed.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gatherer, "acquire", counted)
            loss = mean_square(model, x)
        # A block once, and once more for the module under hooks that are not this library's.
        assert set(acquired.values()) == {2}, acquired
        assert _Noted.packed
        assert not {t.data_ptr() for t in _Noted.packed} & {
            b.data_ptr() for b in optimizer._runtime.pool._owned.values()
        }
        loss.backward()
        optimizer.step()
        mean_square(plain, x).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        model[0].first(x)  # alone, outside of its unit, it gathers its parameters
        with GatheredParameters(list(model.parameters())):
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


class _Table(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, *, is_view: bool) -> None:
        super().__init__()
        self.weight, self.is_view = nn.Parameter(torch.randn(WIDTH, WIDTH)), is_view

    def forward(self) -> Tensor:
        return self.weight.t() if self.is_view else self.weight


class _HandsOut(nn.Module):
    """A unit that hands out the parameter of a module within it where nothing sees it."""

    def __init__(self, *, is_view: bool) -> None:
        super().__init__()
        self.table, self.linear = _Table(is_view=is_view), nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.table()]
        return self.linear(x) @ self.seen[0]


@pytest.mark.parametrize("is_view", [False, True])
def test_a_parameter_that_leaves_a_module_within_its_unit_stays_valid(*, is_view: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_HandsOut(is_view=is_view) for _ in range(3)))
    plain = copy.deepcopy(model)
    x = inputs(0, 0).float()

    def loss_of_all(of: nn.Module) -> Tensor:
        return mean_square(of, x) + sum(block.seen[0].square().sum() for block in of)

    with zero_optimizer_of_one(model) as optimizer:
        for _ in range(3):
            loss, expected = loss_of_all(model), loss_of_all(plain)
            # The loss grows a thousandfold, and rounding with it; a stale value would change its first digits.
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.backward()
            with torch.no_grad():
                for param in plain.parameters():
                    param.sub_(0.1 * param.grad)
                    param.grad = None


def test_leaf_inputs_keep_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    prompt = torch.zeros(2, WIDTH, requires_grad=True)
    with zero_optimizer_of_one(model) as optimizer:
        for _ in range(5):
            model(prompt).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(prompt._backward_hooks or {}) == 0


@contextmanager
def zero_optimizer_of_one(model: nn.Module, stage: int = 3) -> Iterator[ZeroOptimizer]:
    """For one rank, in this process."""
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    yield optimizer
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_a_broken_backward(stage: int) -> None:
    """The next backward counts, without a zero_grad() in between."""
    torch.manual_seed(0)
    model = new_mlp()
    plain = copy.deepcopy(model)
    x = inputs(0, 0).float()
    with zero_optimizer_of_one(model, stage) as optimizer:
        hidden = model[0](x)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[4](model[3](model[2](model[1](hidden)))).sum().backward()
        mean_square(model, x).backward()
        optimizer.step()
        with GatheredParameters(model.parameters()):
            got = [param.detach().clone() for param in model.parameters()]
    mean_square(plain, x).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for value, param in zip(got, plain.parameters(), strict=True):
        torch.testing.assert_close(value, param.detach())
