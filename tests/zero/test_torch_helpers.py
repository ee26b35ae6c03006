"""torch.distributed.checkpoint.state_dict moves training between ZeroOptimizer, FSDP2 and DDP.

The oracle is a run of one plain torch optimizer, in one process and without a move, on the concatenated batch.
"""

# covers zero/_access/full_states.py

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import by_first_rank, device_mesh, run_ranks
from tests.rotation import of_the_day
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import zero_optimizer
from zcomm import StateError
from zero import ZeroOptimizer

WORLD = 2
STEPS_EACH = 5
STEPS = 3 * STEPS_EACH
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
State = tuple[dict[str, Any], dict[str, Any]]


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups_of(model), lr=1e-2, amsgrad=kind == "amsgrad")


@contextmanager
def _fsdp2(model: nn.Module, kind: str, _: Any) -> Any:
    mesh = device_mesh((WORLD,), ("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    yield model, _optimizer(kind, model)


@contextmanager
def _ddp(model: nn.Module, kind: str, _: Any) -> Any:
    yield DistributedDataParallel(model), _optimizer(kind, model)


@contextmanager
def _zero(model: nn.Module, kind: str, options: Any) -> Any:
    with zero_optimizer(model, _optimizer(kind, model), **options) as optimizer:
        yield model, optimizer


def _assert_same(got: Any, wanted: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert type(got) is type(wanted), (got, wanted)
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            _assert_same(got[key], value, rtol, atol)
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            _assert_same(one, other, rtol, atol)
    else:
        assert got == wanted


OTHERS: dict[str, Callable[..., Any]] = {"fsdp2": _fsdp2, "ddp": _ddp}


def _losses(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    """The mean losses over the ranks."""
    losses = []
    for step in steps:
        loss = loss_of(model, *batch(step, 0, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    return losses


@cache
def _unmoved(dtype: torch.dtype, kind: str) -> list[float]:
    def train() -> list[float]:
        model = new_model(dtype)
        optimizer, losses = _optimizer(kind, model), []
        for step in range(STEPS):
            loss = sum(loss_of(model, *batch(step, 0, rank)) for rank in range(WORLD)) / WORLD
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return by_first_rank(train)


def _check_moves(rank: int, other: str, dtype: torch.dtype, kind: str, options: dict[str, Any]) -> None:
    state: State | None = None
    losses: list[float] = []
    for number, build in enumerate((OTHERS[other], _zero, OTHERS[other])):
        model = new_model(dtype, seed=number)
        with build(model, kind, options) as (wrapped, optimizer):
            if state is not None:
                set_model_state_dict(wrapped, state[0], options=FROM_FIRST)
                set_optimizer_state_dict(wrapped, optimizer, state[1], options=FROM_FIRST)
            losses += _losses(wrapped, optimizer, rank, range(STEPS_EACH * number, STEPS_EACH * (number + 1)))
            state = get_state_dict(wrapped, optimizer, options=ON_FIRST)
            assert bool(state[0]) == bool(state[1]) == (rank == 0)
    torch.testing.assert_close(losses, _unmoved(dtype, kind), rtol=TOLERANCE[dtype], atol=0)
    if rank == 0:
        assert {float(one["step"]) for one in state[1]["state"].values() if "step" in one} <= {float(STEPS)}


MOVES = list(itertools.product(["fsdp2", "ddp"], [3, 0, 2, 1], [torch.float32, torch.float64]))


@pytest.mark.parametrize(("other", "stage", "dtype"), of_the_day(MOVES, 6))
def test_training_moves_there_and_back_without_a_trace(other: str, stage: int, dtype: torch.dtype) -> None:
    run_ranks(WORLD, _check_moves, other, dtype, "adamw", {"stage": stage})


KINDS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "momentum": ("sgd", torch.float64, {"stage": 3}),
    "amsgrad": ("amsgrad", torch.float64, {"stage": 2}),
    "host": ("adamw", torch.float32, {"stage": 3, "offload_optimizer": {"device": "cpu"}}),
    "small buckets": ("adamw", torch.float64, {"stage": 3, "allgather_bucket_size": 300, "reduce_bucket_size": 300}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_states_move_too(kind: str) -> None:
    name, dtype, options = KINDS[kind]
    run_ranks(WORLD, _check_moves, "fsdp2", dtype, name, options)


def _check_same_dict_as_plain_torch(rank: int, stage: int) -> None:
    """Frozen and unused parameters, a tied one, two groups, a scheduler's option."""
    shape = {"has_frozen": True, "has_unused": True}
    plain, model = new_model(torch.float64, **shape), new_model(torch.float64, **shape)
    expected = _optimizer("adamw", plain)
    for step in range(3):
        sum(loss_of(plain, *batch(step, 0, r)) / WORLD for r in range(WORLD)).backward()
        expected.step()
        expected.zero_grad()
    expected.param_groups[1]["initial_lr"] = 7.0
    with zero_optimizer(model, _optimizer("adamw", model), stage=stage) as optimizer:
        _losses(model, optimizer, rank, range(3))
        optimizer.param_groups[1]["initial_lr"] = 7.0
        wanted = get_optimizer_state_dict(plain, expected)
        got = get_optimizer_state_dict(model, optimizer, options=ON_FIRST)
        _assert_same(got, wanted if rank == 0 else {}, 1e-10, 1e-15)
        for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
            if stage == 3:
                with pytest.raises(StateError, match="full_state_dict=True, cpu_offload=True"):
                    get_optimizer_state_dict(model, optimizer, options=options)
            else:
                got = get_optimizer_state_dict(model, optimizer, options=options)
                _assert_same(got, wanted, 1e-10, 1e-15)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_state_dict_is_that_of_plain_torch(stage: int) -> None:
    run_ranks(WORLD, _check_same_dict_as_plain_torch, stage)


def _run(rank: int, options: dict[str, Any], steps: range, state: State | None = None) -> tuple[list[float], State]:
    model = new_model(torch.bfloat16, seed=steps.start)
    with _zero(model, "adamw", options) as (_, optimizer):
        if state is not None:
            set_model_state_dict(model, state[0], options=FROM_FIRST)
            set_optimizer_state_dict(model, optimizer, state[1], options=FROM_FIRST)
        losses = _losses(model, optimizer, rank, steps)
        return losses, get_state_dict(model, optimizer, options=ON_FIRST)


def _check_16_bit(rank: int, options: dict[str, Any]) -> None:
    half = STEPS_EACH
    expected, final = _run(rank, options, range(2 * half))
    first, state = _run(rank, options, range(half))
    second, _ = _run(rank, {"stage": 0 if options["stage"] else 3}, range(half, 2 * half), state)
    torch.testing.assert_close(first + second, expected, rtol=1e-2, atol=0)  # another stage adds in another order
    _, again = _run(rank, options, range(half, 2 * half), state)
    _assert_same(again, final)
    if rank == 0:
        weights, states = state[0], state[1]["state"]
        assert all(one["master"].dtype == torch.float32 for one in states.values())
        assert all(torch.equal(states[name]["master"].bfloat16(), weights[name]) for name in states)
        assert any(not torch.equal(one["master"], one["master"].bfloat16().float()) for one in states.values())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_of_16_bit_parameters_are_among_the_states(stage: int) -> None:
    run_ranks(WORLD, _check_16_bit, {"stage": stage})


def test_states_in_files_and_delayed_updates_move(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    run_ranks(WORLD, _check_16_bit, {"stage": 3, "offload_optimizer": nvme})
    run_ranks(WORLD, _check_finished, {"stage": 2, "offload_optimizer": {"device": "cpu"}, "delayed_update": True})


def _check_finished(rank: int, options: dict[str, Any]) -> None:
    """The update that runs when states are asked for is in them."""
    model = new_model()
    with _zero(model, "adamw", options) as (_, optimizer):
        _losses(model, optimizer, rank, range(3))
        state = get_optimizer_state_dict(model, optimizer, options=ON_FIRST)
        if rank == 0:
            assert {one["step"].item() for one in state["state"].values()} == {3.0}
        set_optimizer_state_dict(model, optimizer, state, options=FROM_FIRST)
        _losses(model, optimizer, rank, range(3, 5))


def _check_refused(rank: int) -> None:
    model = new_model(torch.bfloat16, has_unused=True)
    with _zero(model, "adamw", {"stage": 3}) as (_, optimizer):
        _losses(model, optimizer, rank, range(2))
        weights, state = get_state_dict(model, optimizer, options=ON_FIRST)
        flat = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
        name = "blocks.0.norm.weight"

        def refused(text: str, change: Callable[[Any], Any], *, strict: bool = False) -> None:
            changed = copy.deepcopy(state)
            given = change(changed) or changed if rank == 0 else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
            with pytest.raises(StateError, match=text):
                set_optimizer_state_dict(model, optimizer, given, options=options)

        flattened = get_optimizer_state_dict(model, optimizer, options=flat)
        refused("flatten_optimizer_state_dict=False", lambda _: flattened)
        refused(rf"states of '{name}'.*strict=False", lambda s: s["state"].pop(name) and None, strict=True)
        refused("full tensor of shape", lambda s: s["state"][name].update(exp_avg=torch.zeros(3)))
        refused("same groups", lambda s: s["param_groups"][0]["params"].extend(s["param_groups"].pop()["params"]))
        with pytest.raises(Exception, match="call set_model_state_dict, then set_optimizer_state_dict"):
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FROM_FIRST)
        assert _losses(model, optimizer, rank, range(2, 4))


def test_what_cannot_be_exact_is_one_error_on_every_rank() -> None:
    run_ranks(WORLD, _check_refused)


def _check_part_of_ranks(rank: int) -> None:
    model = new_model()
    group = [torch.distributed.new_group([r]) for r in range(WORLD)][rank]
    optimizer = ZeroOptimizer(model, _optimizer("adamw", model), group=group, stage=2)
    with pytest.raises(StateError, match=r"1 of 2; use zero\.save_checkpoint"):
        get_optimizer_state_dict(model, optimizer, options=ON_FIRST)
    optimizer.close()


def test_an_optimizer_over_some_of_the_ranks_is_refused() -> None:
    run_ranks(WORLD, _check_part_of_ranks)
