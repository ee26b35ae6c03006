"""zero.utils.safe_get_* and safe_set_* read and set the values that a single process has."""

# covers zero/_access/safe_access.py

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import full_values, zero_optimizer
from zcomm import LayoutError, StateError
from zero import GatheredParameters, utils

NAMES = ("wte.weight", "blocks.1.norm.bias", "position", "blocks.2.mlp.0.weight")


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, changes: bool) -> None:
    """One step on the batches of two ranks, with the changes that each rank makes in the test."""
    parts = [batch(0, 0, rank) for rank in range(2)]
    tokens, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    loss_of(model, tokens, targets).backward()
    if changes:
        params = dict(model.named_parameters())
        with torch.no_grad():
            for name in NAMES:
                params[name].copy_(_value(params[name], 1))
                params[name].grad.copy_(_value(params[name], 2) * 0.01)
                optimizer.state[params[name]]["exp_avg"].copy_(_value(params[name], 3) * 0.01)
    optimizer.step()
    optimizer.zero_grad()


def _value(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _parts(param: nn.Parameter, local: Tensor | None) -> Tensor:
    """The sum over ranks of the numbers of local elements."""
    count = torch.tensor([0 if local is None else local.numel()])
    torch.distributed.all_reduce(count)
    return count


def _set_all(param: nn.Parameter, *, is_local: bool, rank: int) -> None:
    for seed, what, factor in ((1, "fp32_param", 1.0), (2, "grad", 0.01), (3, "optimizer_state", 0.01)):
        key = ("exp_avg",) if what == "optimizer_state" else ()
        value = _value(param, seed) * factor
        if is_local:
            # This rank's elements: those that changed.
            getattr(utils, f"safe_set_full_{what}")(param, torch.arange(float(param.numel())).view(param.shape), *key)
            mine = getattr(utils, f"safe_get_local_{what}")(param, *key).long()
            getattr(utils, f"safe_set_local_{what}")(param, value.flatten()[mine], *key)
        else:
            getattr(utils, f"safe_set_full_{what}")(param, value if rank == 0 else value * 0, *key)


def _check(rank: int, stage: int) -> None:
    for is_local in (False, True):
        plain, model = new_model(), new_model()
        reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
        with zero_optimizer(model, torch.optim.Adam(model.parameters(), lr=1e-2), stage=stage) as optimizer:
            params, expected = dict(model.named_parameters()), dict(plain.named_parameters())
            assert utils.safe_get_full_grad(params["position"]) is None
            assert utils.safe_get_full_optimizer_state(params["position"], "exp_avg") is None
            loss_of(model, *batch(0, 0, rank)).backward()
            _plain_step(plain, reference, changes=False)
            optimizer.step()
            optimizer.zero_grad()
            for name in NAMES:
                param, state = params[name], reference.state[expected[name]]
                torch.testing.assert_close(utils.safe_get_full_fp32_param(param), expected[name].detach())
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(utils.safe_get_full_optimizer_state(param, key), state[key])
                assert utils.safe_get_full_optimizer_state(param, "step") == 1
                assert utils.safe_get_full_optimizer_state(param, "nothing") is None
                total = _parts(param, utils.safe_get_local_fp32_param(param))
                assert total == param.numel() * (1 if stage else 2)
            loss_of(model, *batch(0, 0, rank)).backward()
            for name in NAMES:
                assert utils.safe_get_full_grad(params[name]).shape == params[name].shape
                _set_all(params[name], is_local=is_local, rank=rank)
                torch.testing.assert_close(utils.safe_get_full_fp32_param(params[name]), _value(params[name], 1))
                torch.testing.assert_close(utils.safe_get_full_grad(params[name]), _value(params[name], 2) * 0.01)
                with GatheredParameters(params[name]):
                    torch.testing.assert_close(params[name].detach(), _value(params[name], 1))
            optimizer.step()
            _plain_step(plain, reference, changes=True)
            got = full_values(model)
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reads_and_sets_as_a_single_process(stage: int) -> None:
    run_ranks(2, _check, stage)


def _check_errors(rank: int) -> None:
    model = new_model(torch.bfloat16, has_frozen=True)
    outside = nn.Parameter(torch.ones(2))
    assert utils.safe_get_full_fp32_param(outside) is None
    with zero_optimizer(model, stage=3) as optimizer:
        weight, frozen = model.wte.weight, model.norm.bias
        full = utils.safe_get_full_fp32_param(weight)
        assert full.dtype == torch.float32
        assert torch.equal(full, new_model(torch.bfloat16).wte.weight.detach().float())
        assert utils.safe_get_full_grad(frozen) is None
        with pytest.raises(StateError, match=r"'wte\.weight' has no gradient"):
            utils.safe_set_full_grad(weight, full)
        with pytest.raises(StateError, match="the first step creates states"):
            utils.safe_set_full_optimizer_state(weight, full, "exp_avg")
        with pytest.raises(LayoutError, match=r"'wte\.weight' must have 888 elements"):
            utils.safe_set_full_fp32_param(weight, full if rank == 0 else full[1:])
        with pytest.raises(StateError, match="construct it first"):
            utils.safe_set_full_fp32_param(outside, outside)
        loss_of(model, *batch(0, 0, rank)).backward()
        with optimizer.no_sync():
            loss_of(model, *batch(0, 0, rank)).backward()
        with pytest.raises(StateError, match=r"a part of the gradient of 'wte\.weight' is reduced"):
            utils.safe_get_full_grad(weight)
        optimizer.zero_grad()


def test_errors() -> None:
    run_ranks(2, _check_errors)


def _check_numbers(rank: int) -> None:
    """A state that is one number: rank 0's for the full one, each rank's own for the local one; it keeps its type."""
    for optimizer_class, kind in ((torch.optim.AdamW, torch.Tensor), (zero.Lamb, int)):
        model = nn.Linear(40, 300)
        with zero_optimizer(model, optimizer_class, stage=1, lr=0.01) as optimizer:
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            utils.safe_set_full_optimizer_state(model.weight, torch.tensor(7.0 + 2 * rank), "step")
            held = [optimizer.parts.runtime.states.get(param, "step") for param in (model.weight, model.bias)]
            assert [float(step) for step in held[0]] == [7.0] * len(held[0])
            assert [float(step) for step in held[1]] == [1.0] * len(held[1])
            assert all(type(step) is kind for step in held[0])
            assert utils.safe_get_full_optimizer_state(model.weight, "step") == 7
            utils.safe_set_full_optimizer_state(model.weight, 8.0, "step")
            assert utils.safe_get_full_optimizer_state(model.weight, "step") == 8
            utils.safe_set_local_optimizer_state(model.weight, torch.tensor(7.0 + 2 * rank), "step")
            own = [float(step) for step in optimizer.parts.runtime.states.get(model.weight, "step")]
            assert own == [7.0 + 2 * rank] * len(held[0])


def test_states_of_one_number() -> None:
    run_ranks(2, _check_numbers)


def _local_loss(model: nn.Module, rank: int, micro: int, stage: int) -> Tensor:
    """On rank 1 the loss of all parameters, on rank 0 of one alone; at stage 3 of all, as gathers must match."""
    return loss_of(model, *batch(0, micro, rank)) if rank or stage == 3 else model.position.sum() * (micro + 1.0)


def _check_unreduced(rank: int, stage: int) -> None:
    """In no_sync, and before a boundary of stages 0 and 1: the mean of what plain backwards sum up; reading it changes
    nothing."""
    for in_block in (True, False) if stage < 2 else (True,):
        plain, model = new_model(), new_model()
        options = {} if in_block else {"gradient_accumulation_steps": 3}
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with zero_optimizer(model, sgd, stage=stage, **options) as optimizer:
            for micro in range(2):
                with optimizer.no_sync() if in_block else nullcontext():
                    _local_loss(model, rank, micro, stage).backward()
                _local_loss(plain, rank, micro, stage).backward()
                _assert_means(model, plain)
            _local_loss(model, rank, 2, stage).backward()
            _local_loss(plain, rank, 2, stage).backward()
            _assert_means(model, plain)
            optimizer.step()
            optimizer.zero_grad()
            assert utils.safe_get_full_grad(model.position) is None
            got = full_values(model)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(got[name], param.detach() - 0.1 * _mean_of(param))


def _mean_of(param: nn.Parameter) -> Tensor:
    mean = torch.zeros_like(param) if param.grad is None else param.grad.clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()


def _assert_means(model: nn.Module, plain: nn.Module) -> None:
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        mean = _mean_of(expected)
        torch.testing.assert_close(utils.safe_get_full_grad(param), mean)
        own = utils.safe_get_local_grad(param)
        parts: list[Tensor] = [own] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, own)
        joined = torch.cat(parts)  # at stage 0 every rank has all
        torch.testing.assert_close(joined[: mean.numel()], mean.flatten())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_not_reduced_yet_are_read_as_their_mean(stage: int) -> None:
    run_ranks(2, _check_unreduced, stage)
