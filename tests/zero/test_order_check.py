"""Ranks that run different modules at stage 3: one error on every rank, at once, that names parameters and ranks."""

# covers zero/optimizer.py

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import StateError

Forward = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """Four layers of equal size: sizes do not show that one rank gathers another layer than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.order: tuple[int, ...] = (0, 1, 2, 3)
        self.cuts_graph = False

    def forward(self, x: Tensor) -> Tensor:
        for place, index in enumerate(self.order):
            x = self.layers[index](x).tanh()
            if self.cuts_graph and place == 0:
                x = x.detach()
        return x


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "skips a layer": (
        {"order": (0, 2, 3)},
        r"rank 0: gathers parameter 'layers\.1\.weight' \(6, 6\) and 1 more of module 'layers\.1' in forward, use 1 of "
        r"training; rank 1: gathers parameter 'layers\.2\.weight' .* in forward",
    ),
    "skips the last layer": (
        {"order": (0, 1, 2)},
        r"rank 0: .*'layers\.3\.weight'.* in forward.*; rank 1: .*'layers\.2\.weight'.* in backward",
    ),
    "skips a layer in backward": (
        {"cuts_graph": True},
        r"rank 0: .*'layers\.0\.weight'.* in backward.*; rank 1: has reached the end of backward",
    ),
}


def _check_named_error(rank: int, name: str, num_right_steps: int) -> None:
    """After ``num_right_steps`` rank 1 runs something else; after several only ZERO_DEBUG=1 checks."""
    change, message = WRONG[name]
    torch.manual_seed(0)
    model = Layers()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3) as optimizer:
        optimizer._runtime.gatherer._check.is_always_on = num_right_steps > 0
        for _ in range(num_right_steps):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 1:
            vars(model).update(change)
        start = time.perf_counter()
        with pytest.raises(StateError, match=f"every rank must run the same modules.*{message}"):
            model(torch.ones(2, 6)).sum().backward()
        assert time.perf_counter() - start < 10


@pytest.mark.parametrize("num_right_steps", [0, 3])
@pytest.mark.parametrize("name", WRONG)
def test_a_rank_that_differs_is_a_named_error_on_all(name: str, num_right_steps: int) -> None:
    run_ranks(2, _check_named_error, name, num_right_steps)


def _check_changed_differently(rank: int) -> None:
    """Every rank leaves the recorded order, each differently; then all continue together."""
    torch.manual_seed(0)
    model = Layers()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=3) as optimizer:

        def step() -> None:
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        model.order = (0, 3, 2, 1) if rank else (0, 2, 1, 3)
        with pytest.raises(StateError, match=r"rank 0: .*'layers\.2\.weight'.*; rank 1, 2: .*'layers\.3\.weight'"):
            step()
        optimizer.zero_grad()
        model.order = (3, 2)
        step()
        step()
        values = full_values(model)
    assert all(value.isfinite().all() for value in values.values())


def test_orders_that_change_differently_are_compared() -> None:
    run_ranks(3, _check_changed_differently)
