"""Parameters used outside the module that owns them, declared and undeclared: equal to a single process.

Megatron's three cases: a word embedding that computes the logits, a bias that a submodule returns, and two of them.
"""

# covers zero/optimizer.py

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, linear
from torch.utils.checkpoint import checkpoint

from tests.ranks import by_first_rank, run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import StateError
from zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

WIDTH = 6


class LinearReturningBias(nn.Linear):
    """Like Megatron's parallel layers with skip_bias_add."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return linear(x, self.weight), self.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.dense = LinearReturningBias(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.dense(self.query(x).tanh())


class MLP(nn.Module):
    """Case 2: the bias of its first layer."""

    def __init__(self, *, registers: bool) -> None:
        super().__init__()
        self.dense_h_to_4h = LinearReturningBias(WIDTH, 4 * WIDTH)
        self.dense_4h_to_h = LinearReturningBias(4 * WIDTH, WIDTH)
        if registers:
            register_external_parameter(self, self.dense_h_to_4h.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, bias = self.dense_h_to_4h(x)
        return self.dense_4h_to_h(gelu(hidden + bias))


class Layer(nn.Module):
    """Case 3: the biases of both its parts."""

    def __init__(self, *, registers: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = MLP(registers=registers)
        if registers:
            register_external_parameter(self, self.attention.dense.bias)
            register_external_parameter(self, self.mlp.dense_4h_to_h.bias)

    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.attention(x)
        x = x + dropout(out + bias, p=0.0)
        out, bias = self.mlp(x)
        return x + dropout(out + bias, p=0.0)


class LanguageModel(nn.Module):
    """Case 1: the embedding's weight is used for the logits, by a module that does not own it."""

    def __init__(self, *, registers: bool, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(11, WIDTH))
        self.layers = nn.ModuleList(Layer(registers=registers) for _ in range(2))
        self.checkpoints = checkpoints
        if registers:
            register_external_parameter(self, self.embedding[0].weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return linear(x, self.embedding[0].weight)


def _tokens(step: int, rank: int) -> Tensor:
    return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def _train_plain(world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    plain = LanguageModel(registers=False).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        plain(torch.cat([_tokens(step, rank) for rank in range(world_size)])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in plain.named_parameters()}


def _check_equals_plain(rank: int, is_built_sharded: bool) -> None:  # noqa: FBT001
    expected = by_first_rank(lambda: _train_plain(2))
    for registers in (True, False):
        for checkpoints in (True, False):
            torch.manual_seed(0)
            with Init(dtype=torch.float64) if is_built_sharded else nullcontext():
                model = LanguageModel(registers=registers, checkpoints=checkpoints)
            model = model if is_built_sharded else model.double()
            with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3) as optimizer:
                for step in range(3):
                    model(_tokens(step, rank)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with pytest.raises(StateError, match=r"'embedding\.0\.weight' is released"):
                    model.embedding[0].weight.sum()
                got = full_values(model)
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_built_sharded", [False, True])
def test_megatron_equals_single_process(is_built_sharded: bool) -> None:  # noqa: FBT001
    run_ranks(2, _check_equals_plain, is_built_sharded)


class Borrowing(nn.Module):
    """Uses its child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 5)
        self.own = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.own(x), self.child.weight)


def _declared_late(model: nn.Module) -> None:
    register_external_parameter(model, model.child.weight)


def _by_gathering(model: nn.Module) -> None:
    with GatheredParameters(model.child.weight, fwd_module=model):
        assert model.child.weight.sum() == model.child.weight.sum()


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "found": lambda _: None,
    "declared late": _declared_late,
    "by GatheredParameters": _by_gathering,
}


def _check_ways(rank: int) -> None:
    for declare in WAYS.values():
        torch.manual_seed(0)
        plain = Borrowing()
        model = copy.deepcopy(plain)
        x = torch.randn(3, 5)
        plain(x).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3) as optimizer:
            declare(model)
            with torch.no_grad():
                model(x)
            model(x).sum().backward()
            optimizer.step()
            values = full_values(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(values[name], param.detach())
    register_external_parameter(model, model.own.weight)
    unregister_external_parameter(model, model.own.weight)
    with pytest.raises(StateError, match="is not registered"):
        unregister_external_parameter(model, model.own.weight)


def test_ways_to_declare() -> None:
    run_ranks(2, _check_ways)


def _check_released_after_first_use(rank: int) -> None:
    model = Borrowing()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3):
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(3, 5))
            with pytest.raises(StateError, match=r"'child\.weight' is released"):
                model.child.weight.sum()


def test_what_a_forward_is_found_to_use_is_released_at_its_end() -> None:
    run_ranks(2, _check_released_after_first_use)
