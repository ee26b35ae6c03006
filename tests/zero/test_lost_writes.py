"""Writes to gathered parameters of stage 3, in forward: an error by name; inside a block they count, as in torch."""

# covers zero/_gather/lost_writes.py

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.variables import variables
from tests.zero.training import full_values, zero_optimizer
from zcomm import DivergedError, StateError

WRITES: dict[str, Any] = {
    "in place": lambda key, query: key.mul_(0.5).add_(query, alpha=0.5),
    "copy_": lambda key, query: key.copy_(0.5 * key + 0.5 * query),
    "other memory": lambda key, query: setattr(key, "data", 0.5 * key.data + 0.5 * query.data),
    "behind autograd": lambda key, query: key.data.mul_(0.5).add_(query.data, alpha=0.5),
}

OTHERS: dict[str, Any] = {
    "same values": lambda key, query: setattr(key, "data", key.data.clone() + 0 * query.data),
    "on one rank": lambda key, query: key.add_(query) if torch.distributed.get_rank() else key + query,
}


class KeyEncoder(nn.Module):
    """As MoCo: the frozen key encoder follows the query encoder, in forward."""

    def __init__(self, how: str, *, in_block: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.in_block = how, in_block
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.query(x)
        keys, queries = list(self.key.parameters()), list(self.query.parameters())
        block = zero.GatheredParameters(keys + queries, modifier_rank=0) if self.in_block else nullcontext()
        with torch.no_grad(), block:
            for key, query in zip(keys, queries, strict=True) if self.how else ():
                (WRITES | OTHERS)[self.how](key, query)
        return (found - self.key(x).detach() - 1).square().mean()


def _batches(rank: int) -> list[Tensor]:
    return [torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank)) for step in range(3)]


def _trained_by_torch(how: str) -> dict[str, Tensor]:
    model = KeyEncoder(how)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.3)
    for both in zip(_batches(0), _batches(1), strict=True):
        mine, other = copy.deepcopy(model), model  # each rank's forward moves the key encoder, by the same
        ((mine(both[0]) + other(both[1])) / 2).backward()
        for param, extra in zip(model.query.parameters(), mine.query.parameters(), strict=True):
            assert param.grad is not None
            assert extra.grad is not None
            param.grad += extra.grad
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def _check_refused(rank: int, how: str, options: dict[str, Any]) -> None:
    model = KeyEncoder(how)
    with zero_optimizer(model, torch.optim.SGD(model.query.parameters(), lr=0.3), stage=3, **options) as optimizer:
        (first, second, third) = _batches(rank)
        model(first).backward()
        with pytest.raises(StateError, match=r"2 parameters were written to .*'key.weight'.*modifier_rank=0"):
            optimizer.step()
        optimizer.zero_grad()
        model.how = ""
        for batch in (second, third):  # it is raised once
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("how", ["in place", "copy_", "other memory"])
def test_they_are_an_error_at_the_step(how: str) -> None:
    run_ranks(2, _check_refused, how, {})


def test_they_are_an_error_where_layers_stay_full() -> None:
    run_ranks(2, _check_refused, "in place", {"stage3_max_reuse_distance": 10**9})


def _check_debug(rank: int) -> None:
    with variables(ZERO_DEBUG="1"):
        _check_refused(rank, "behind autograd", {})


def test_writes_that_no_counter_counts_are_found_with_zero_debug() -> None:
    run_ranks(2, _check_debug)


def _check_in_block(rank: int, how: str, options: dict[str, Any]) -> None:
    expected, model = _trained_by_torch(how), KeyEncoder(how, in_block=True)
    with zero_optimizer(model, torch.optim.SGD(model.query.parameters(), lr=0.3), stage=3, **options) as optimizer:
        for batch in _batches(rank):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, values in full_values(model).items():
            assert torch.allclose(values, expected[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("how", list(WRITES))
def test_inside_a_block_in_forward_they_count(how: str) -> None:
    for options in ({}, {"stage3_max_reuse_distance": 10**9}):
        run_ranks(2, _check_in_block, how, options)


def _check_one_rank(rank: int) -> None:
    """The others would wait for this rank: all get an error, at the end of the backward."""
    model = KeyEncoder("on one rank")
    with (
        zero_optimizer(model, torch.optim.SGD(model.query.parameters(), lr=0.3), stage=3),
        pytest.raises(DivergedError, match=r"'key.weight'.*written to outside zero.GatheredParameters"),
    ):
        model(_batches(rank)[0]).backward()


def test_those_of_one_rank_are_an_error_on_all() -> None:
    run_ranks(2, _check_one_rank)


def _check_persistent(rank: int) -> None:
    """Small parameters that stay whole are overwritten at the step."""
    _check_refused(rank, "in place", {"stage3_param_persistence_threshold": 10**6})


def test_they_are_an_error_for_parameters_that_are_never_released() -> None:
    run_ranks(2, _check_persistent)


def _check_other_memory(rank: int) -> None:
    model = KeyEncoder("same values")
    with zero_optimizer(model, torch.optim.SGD(model.query.parameters(), lr=0.3), stage=3) as optimizer:
        for batch in _batches(rank):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_other_memory_with_the_same_values_is_no_write() -> None:
    """As of an RNN's ``flatten_parameters()`` on a GPU."""
    run_ranks(2, _check_other_memory)


def _check_beside_blocks(rank: int) -> None:
    """A block adopts or refuses what is written to its own parameters inside; other writes stay errors."""
    model = KeyEncoder("")
    weight, bias = model.key.weight, model.key.bias
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.3)
    with zero_optimizer(model, optimizer, stage=3, stage3_max_reuse_distance=10**9) as wrapped, torch.no_grad():
        for _ in range(2):  # then layers stay full
            model(_batches(rank)[0])
        with zero.GatheredParameters([weight], modifier_rank=0):
            bias.mul_(2)
            weight.mul_(2)
        with pytest.raises(StateError, match=r"1 parameters were written to .*'key.bias'"):
            wrapped.step()
        with pytest.raises(StateError, match="in-place modification"), zero.GatheredParameters([weight]):
            weight.mul_(2)
        wrapped.step()


def test_writes_beside_the_parameters_of_a_block() -> None:
    run_ranks(2, _check_beside_blocks)


def _check_step_in_block(rank: int) -> None:
    model = KeyEncoder("")
    with zero_optimizer(model, torch.optim.SGD(model.query.parameters(), lr=0.3), stage=3) as optimizer:
        batch = _batches(rank)[0]
        model(batch).backward()
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            before = model.query.weight.detach().clone()
            with pytest.raises(StateError, match=r"step\(\) inside zero.GatheredParameters"):
                optimizer.step()
            assert torch.equal(model.query.weight, before)
        optimizer.step()
        assert not torch.equal(full_values(model)["query.weight"], before)


def test_a_step_inside_a_block_is_an_error() -> None:
    run_ranks(2, _check_step_in_block)
