"""zero.GatheredParameters: full parameters within a block, on every rank, and errors that every rank gets."""

# covers zero/_ranks/collective_calls.py zero/_runtime/gathered_edits.py zero/_runtime/untracked_edits.py

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import StateError, TopologyError
from zero import GatheredParameters, ZeroOptimizer


def _check_blocks(rank: int) -> None:
    plain = dict(new_model().named_parameters())
    for stage in (1, 3):
        model = new_model()
        with zero_optimizer(model, stage=stage) as optimizer:
            first, second = model.blocks[0], model.blocks[1]
            with GatheredParameters(first.mlp[0].weight):
                with GatheredParameters([first.mlp[0].weight, second.norm.bias]), GatheredParameters([]):
                    assert torch.equal(second.norm.bias, plain["blocks.1.norm.bias"])
                assert torch.equal(first.mlp[0].weight, plain["blocks.0.mlp.0.weight"]), "held by the outer block"
            with GatheredParameters(model.parameters(), 0, enabled=stage == 1):
                if stage == 3:
                    with pytest.raises(StateError, match="is released"):
                        first.mlp[0].weight.sum()
            outside = nn.Parameter(torch.ones(2))
            with GatheredParameters([outside, *model.parameters()], modifier_rank=1), torch.no_grad():
                if rank == 1:
                    first.norm.weight.mul_(3)
                    model.wte.weight[2] = 7.0
                    second.norm.bias.data = torch.full_like(second.norm.bias, 5.0)
            got = full_values(model)
            assert (got["blocks.0.norm.weight"] == 3).all()
            assert (got["wte.weight"][2] == 7).all()
            assert (got["blocks.1.norm.bias"] == 5).all()
            changed = {"blocks.0.norm.weight", "wte.weight", "blocks.1.norm.bias"}
            assert all(torch.equal(got[name], plain[name]) for name in plain.keys() - changed)
            loss_of(model, *batch(0, 0, rank)).backward()
            optimizer.step()


def test_nested_several_and_modified() -> None:
    run_ranks(2, _check_blocks)


def _fail_on_rank_1(weight: nn.Parameter, rank: int) -> None:
    with GatheredParameters(weight, modifier_rank=0):
        if rank == 1:
            raise OSError("disk full")


def _change_on_rank_1(model: nn.Module, weight: nn.Parameter, rank: int) -> None:
    with GatheredParameters(model.parameters()), torch.no_grad():
        if rank == 1:
            weight.add_(1)


def _check_errors(rank: int) -> None:
    for stage in (2, 3):
        model = new_model()
        with zero_optimizer(model, stage=stage) as optimizer:
            weight = model.blocks[0].norm.weight
            with pytest.raises(OSError if rank == 1 else StateError, match="disk full") as error:
                _fail_on_rank_1(weight, rank)
            assert rank == 1 or "rank 1: OSError" in str(error.value)
            with pytest.raises(TopologyError, match="modifier_rank=2"), GatheredParameters(weight, modifier_rank=2):
                pass
            before = full_values(model)
            if stage == 3:
                with pytest.raises(StateError, match=r"'blocks\.0\.norm\.weight'.*modifier_rank="):
                    _change_on_rank_1(model, weight, rank)
                assert_same_bits(full_values(model), before)
            loss_of(model, *batch(0, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_errors_are_raised_on_every_rank() -> None:
    run_ranks(2, _check_errors)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: object) -> torch.Tensor:
        raise ValueError("made up")


def _check_failed_inside(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with zero_optimizer(model, stage=3, stage3_param_persistence_threshold=0) as optimizer:
        x = torch.ones(2, 8)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model[2].weight
        with GatheredParameters([weight], modifier_rank=0):
            with torch.no_grad():
                weight.fill_(7.0)
            with pytest.raises(ValueError, match="made up"):
                model(_Fails.apply(x.clone().requires_grad_())).sum().backward()
            with torch.no_grad():
                assert weight.eq(7).all()
                assert torch.equal(model(x), model[2](model[1](model[0](x))))  # recovers first
            assert weight.eq(7).all()
        with GatheredParameters([weight]):
            assert weight.eq(7).all()
        with GatheredParameters([weight]):  # a step releases it: it has the old values
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(StateError, match="is released"):
                weight.sum()
        with GatheredParameters([weight]):
            assert weight.ne(7).any()


def test_a_backward_that_fails_inside_leaves_the_block_its_parameters() -> None:
    run_ranks(2, _check_failed_inside)


def _check_closed(rank: int, stage: int) -> None:
    model = new_model()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
    loss_of(model, *batch(0, 0, rank)).backward()
    optimizer.close()
    with pytest.raises(StateError, match="this optimizer is closed"):
        optimizer.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_after_close_is_an_error(stage: int) -> None:
    run_ranks(2, _check_closed, stage)
