"""A gradient that arrives after its bucket was reduced is reduced in a second exchange, on every rank."""

# covers zero/_gradients/grad_attribute.py zero/_gradients/bucket_reduce_scatter.py zero/_gradients/step_consistency.py

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import DivergedError, StateError
from zero._gradients import reducer
from zero.utils import safe_get_full_grad

WIDTH = 8


class _UsedTwice(nn.Module):
    """Each use of ``shared`` has a backward of its own; its bucket, the first, is reduced between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, uses_twice: bool) -> Tensor:
        x = self.first(x).tanh()
        if uses_twice:
            x = checkpoint(self.shared, x, use_reentrant=True)
        return checkpoint(self.shared, self.between(x).tanh(), use_reentrant=True)


def _new() -> _UsedTwice:
    torch.manual_seed(0)
    return _UsedTwice().double()


def _inputs() -> Tensor:
    world_size = torch.distributed.get_world_size()
    return torch.linspace(-1, 1, world_size * 4 * WIDTH, dtype=torch.float64).view(world_size, 4, WIDTH)


def _check(rank: int, stage: int, is_everybodys: bool) -> None:  # noqa: FBT001
    plain, model, x = _new(), _new(), _inputs()
    twice = [is_everybodys or each == len(x) - 1 for each in range(len(x))]
    for each, is_late in enumerate(twice):
        (plain(x[each], uses_twice=is_late).sum() / len(x)).backward()
    with (
        mock.patch.object(reducer, "MIN_WAIT_S", 0.3),
        zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, reduce_bucket_size=1),
    ):
        model(x[rank], uses_twice=twice[rank]).sum().backward()
        for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            got = safe_get_full_grad(param)
            assert got is not None, name
            torch.testing.assert_close(got.double(), reference.grad, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("world_size", "stage", "is_everybodys"),
    [
        *((world_size, stage, True) for world_size in (1, 2) for stage in (0, 1, 2, 3)),
        *((world_size, stage, False) for world_size in (2, 3) for stage in (0, 1, 2)),
    ],
)
def test_a_layer_used_twice_under_reentrant_checkpointing(world_size: int, stage: int, is_everybodys: bool) -> None:  # noqa: FBT001
    """With is_everybodys=False only the last rank uses it twice, which stage 3 does not allow."""
    run_ranks(world_size, _check, stage, is_everybodys)


class _Branches(nn.Module):
    """A step may use one branch while a graph of the other is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(2))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x).square().mean()


def _assert_same(model: nn.Module, plain: nn.Module) -> None:
    values = full_values(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(values[name], param.detach(), rtol=1e-12, atol=1e-12, msg=name)


def _branches() -> _Branches:
    torch.manual_seed(0)
    return _Branches().double()


def _check_kept_by_one(rank: int, stage: int) -> None:
    """Rank 1 alone runs a graph from before the step, of the branch that the step left unchanged."""
    plain, model, x = _branches(), _branches(), _inputs()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    of_plain = plain(x[1], "right"), sum(plain(each, "left") for each in x)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=stage) as optimizer:
        kept = model(x[rank], "right")
        model(x[rank], "left").backward()
        optimizer.step()
        optimizer.zero_grad()
        (of_plain[1] / len(x)).backward()
        reference.step()
        reference.zero_grad()
        if stage == 3:
            with pytest.raises((DivergedError, StateError), match="must run the same modules"):
                (kept if rank else model(x[rank], "left")).backward()
        else:
            (kept if rank else model(x[rank], "left")).backward()
            optimizer.step()
            ((plain(x[0], "left") + of_plain[0]) / len(x)).backward()
            reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        model(x[rank], "left").backward()  # training continues
        optimizer.step()
        (sum(plain(each, "left") for each in x) / len(x)).backward()
        reference.step()
        _assert_same(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_that_one_rank_kept_over_a_step_is_right_or_named_on_all(stage: int) -> None:
    run_ranks(2, _check_kept_by_one, stage)


def _check_stale_by_one(rank: int, stage: int) -> None:
    """Rank 1 alone runs a graph of values that the step has changed: it raises there, as in torch."""
    plain, model, x = _branches(), _branches(), _inputs()
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    is_named = pytest.raises(DivergedError, match="must run the same modules") if stage == 3 else nullcontext()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5), stage=stage) as optimizer, is_named:
        stale = model(x[rank], "left")
        for _ in range(2):
            model(x[rank], "left").backward()
            optimizer.step()
            optimizer.zero_grad()
            (sum(plain(each, "left") for each in x) / len(x)).backward()
            reference.step()
            reference.zero_grad()
            if rank == 1:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    stale.backward(retain_graph=True)
                optimizer.zero_grad()
        _assert_same(model, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_old_graph_that_one_rank_runs_alone_raises_there(stage: int) -> None:
    """The others continue; at stage 3, where it gathers parameters first, all learn of it at their next use."""
    run_ranks(2, _check_stale_by_one, stage)
