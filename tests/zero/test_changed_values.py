"""Changing and copying parameters outside the training loop: masters, copies and other ranks see the new values."""

# covers zcomm/_base/env.py

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
from tests.ranks import run_ranks
from tests.variables import variables
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import StateError
from zero import GatheredParameters, ZeroOptimizer

WIDTH = 8


def new_layers(dtype: torch.dtype = torch.float32, num: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num)]).to(dtype)


def train_once(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    x = torch.randn(2, WIDTH).to(next(model.parameters()).dtype)
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def masters_of(optimizer: ZeroOptimizer) -> list[tuple[nn.Parameter, Tensor]]:
    return [(param, master.clone()) for param, _, master in optimizer.master_pieces()]


def _check_only_what_changed_is_taken(rank: int, stage: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = new_layers(dtype)
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage, **options) as optimizer:
        train_once(model, optimizer)
        before = masters_of(optimizer)
        bias = model[0].bias
        with GatheredParameters([bias, model[1].weight], modifier_rank=1), torch.no_grad():
            bias[:3] = rank + 2.0
        for (param, old), (_, new) in zip(before, masters_of(optimizer), strict=True):
            if param is bias:
                assert new[:3].tolist() == [3.0] * 3
            first = 3 if param is bias else 0
            assert torch.equal(old[first:], new[first:]), "a master was rounded"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_keep_what_nobody_changed(stage: int) -> None:
    run_ranks(2, _check_only_what_changed_is_taken, stage, torch.bfloat16, {})
    if stage:
        run_ranks(2, _check_only_what_changed_is_taken, stage, torch.float32, {"quantized_weights": True})


def _check_copy_is_independent(rank: int, stage: int) -> None:
    model = new_layers(torch.bfloat16)
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage) as optimizer:
        train_once(model, optimizer)
        with GatheredParameters(model.parameters()):
            average = copy.deepcopy(model)
        before, values = masters_of(optimizer), full_values(model)
        average(torch.randn(2, WIDTH).bfloat16()).float().sum().backward()
        assert all(param.grad is not None for param in average.parameters())
        average.load_state_dict(new_layers(torch.bfloat16, seed=5).state_dict())
        assert_same_bits(full_values(model), values)
        for (_, old), (_, new) in zip(before, masters_of(optimizer), strict=True):
            assert torch.equal(old, new)
        assert_same_bits(dict(average.named_parameters()), dict(new_layers(torch.bfloat16, seed=5).named_parameters()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deep_copy_has_a_life_of_its_own(stage: int) -> None:
    run_ranks(2, _check_copy_is_independent, stage)


def _check_load(rank: int, stage: int) -> None:
    model, other = new_layers(), new_layers(seed=3)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        start = full_values(model)
        model.load_state_dict(model.state_dict())
        assert_same_bits(full_values(model), start)
        on_rank_0 = other.state_dict() if rank == 0 else {}
        model.load_state_dict(on_rank_0)
        assert_same_bits(full_values(model), other.state_dict())
        partial = {"0.weight": torch.ones(WIDTH, WIDTH)}
        model.load_state_dict(partial, strict=False)
        assert full_values(model)["0.weight"].eq(1).all()
        for wrong in ({"0.weight": torch.ones(1, 1)}, partial):
            with pytest.raises(RuntimeError, match="loading state_dict"):
                model.load_state_dict(wrong if rank == 0 else {})
        train_once(model, optimizer)  # the ranks' calls still match


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_load_state_dict_takes_rank_0_and_fails_on_every_rank(stage: int) -> None:
    run_ranks(2, _check_load, stage)


def _check_close(rank: int, stage: int) -> None:
    model = new_layers(torch.bfloat16)
    x = torch.randn(2, WIDTH).bfloat16()
    for _ in range(2):  # a closed model can be wrapped again
        with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
            train_once(model, optimizer)
            model(x).float().sum().backward()
            values = full_values(model)
            with GatheredParameters(model.parameters()):
                optimizer.close()
        assert_same_bits(dict(model.named_parameters()), values)
    plain = new_layers(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    for module in (model, plain):
        module(x).float().sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad.dtype == torch.bfloat16
        assert torch.equal(param.grad, other.grad)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_model_is_an_ordinary_one(stage: int) -> None:
    run_ranks(2, _check_close, stage)


def test_closed_while_released_is_a_named_error() -> None:
    model = new_layers()
    ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1).close()
    for use in (
        lambda: GatheredParameters(model.parameters()).__enter__(),
        lambda: ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1),
    ):
        with pytest.raises(StateError, match="inside zero"):
            use()


def _check_partial_clear(rank: int, stage: int) -> None:
    model = new_layers(torch.float64)
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for step in range(2):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).double()
            for module in (model, plain):
                module(x).square().sum().backward()
                if step == 0:
                    module[1].zero_grad()
        norm = optimizer.clip_grad_norm_(1.0).item()
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
        reference.step()
        got = full_values(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_of_a_part_of_the_model(stage: int) -> None:
    run_ranks(2, _check_partial_clear, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_assigned_memory_is_taken_over_or_refused(stage: int) -> None:
    model = new_layers()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    weight = model[1].weight
    with GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.ones(WIDTH, WIDTH)
    train_once(model, optimizer)
    with GatheredParameters(weight):
        assert 0 < (weight - 1).abs().max() < 1e3
    if stage < 3:
        weight.data = torch.ones(WIDTH, WIDTH)
        with pytest.raises(StateError, match=r"'1\.weight' got other memory, of torch\.float32 on cpu"):
            optimizer.step()


def _check_lost_change(rank: int, stage: int, dtype: torch.dtype, options: dict[str, Any], is_lost: bool) -> None:  # noqa: FBT001
    model = new_layers(dtype)
    model[2].requires_grad_(False)
    trainable = [*model[0].parameters(), *model[1].parameters()]
    built = zero_optimizer(model, torch.optim.SGD(trainable, lr=0.1), stage=stage, **options)
    with variables(ZERO_DEBUG="1"), built as optimizer:
        train_once(model, optimizer)
        with GatheredParameters(trainable, modifier_rank=0), torch.no_grad():
            model[1].bias.fill_(rank)
        train_once(model, optimizer)
        model.load_state_dict(new_layers(dtype, seed=1).state_dict())
        train_once(model, optimizer)
        if rank == 1 or not is_lost:
            with torch.no_grad():
                model[1].bias[0] = 5.0
        if is_lost:
            for _ in range(2):
                with pytest.raises(StateError, match=r"first \['1\.bias'\].*GatheredParameters"):
                    optimizer.step()
        else:
            optimizer.step()
            assert full_values(model)["1.bias"][0] == 5.0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lost_changes_are_found_in_debug_mode(stage: int) -> None:
    run_ranks(2, _check_lost_change, stage, torch.bfloat16, {}, True)
    run_ranks(2, _check_lost_change, stage, torch.float32, {}, False)
    run_ranks(2, _check_lost_change, stage, torch.float32, {"quantized_weights": True}, stage > 0)


def test_the_pool_forgets_one_off_buffers() -> None:
    model = new_layers(num=8)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
    for _ in range(3):
        train_once(model, optimizer)
    usual = optimizer.memory().buffers["pool"]
    full_values(model)  # all layers are full at once
    assert optimizer.memory().buffers["pool"] > usual
    for _ in range(2):
        train_once(model, optimizer)
    assert optimizer.memory().buffers["pool"] == usual


def _check_frozen_stays_in_the_node(rank: int) -> None:
    model = new_layers(num=2)
    model[0].requires_grad_(False)
    options = {"ranks_per_node": 2, "stage": 3, "hpz_partition_size": 2}
    with zero_optimizer(model, torch.optim.SGD(model[1].parameters(), lr=0.1), **options) as optimizer:
        train_once(model, optimizer)
        with zcomm.traffic() as sent:
            train_once(model, optimizer)
    assert sent.calls(operation="all_gather", link="inter") == 1  # the layer that changed


def test_secondary_partition_of_frozen_parameters_stays_valid() -> None:
    run_ranks(4, _check_frozen_stays_in_the_node)
