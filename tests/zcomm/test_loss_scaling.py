"""Residuals with a loss scale: gradients have the bits of a run without one, times a power of 2."""

# covers zcomm/_residuals/grad_scaler.py

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.fsdp2 import full_grad, value_of
from tests.zcomm.models import Given, flat_grad
from zcomm import ConfigError, Recipe, Residual
from zcomm._residuals.grad_scaler import UserLossScale

SIZES = {"a": 5000, "b": 3001}
RECIPE = Recipe(weights="none", gradients=("none", "int4"), reduced="none", residual=True)
SCALES = (2.0**16, 2.0**16, 2.0**15, 2.0**11, 2.0**12, 2.0**-3, 1.0, 2.0**20)


class _ByHand:
    """A loss scaler of a user's script."""

    def __init__(self) -> None:
        self.scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def _installed(engine: str, **options: Any) -> tuple[nn.Module, nn.Module, zcomm.Installation, Callable[[], Tensor]]:
    model: nn.Module = Given(SIZES)
    if engine == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
        installed = zcomm.install_ddp(wrapped, RECIPE, topology=topology(2), **options)
        return model, wrapped, installed, lambda: flat_grad(model)
    wrapped = fully_shard(model)
    return model, wrapped, zcomm.install_fsdp2(model, RECIPE, topology=topology(2), **options), lambda: full_grad(model)


def _loss(wrapped: nn.Module, rank: int, step: int) -> Tensor:
    values = {name: value_of(name, rank, numel) * (1 + 0.1 * step) for name, numel in SIZES.items()}
    loss: Tensor = wrapped(values)
    return loss


def _unscaled(rank: int, engine: str, num_steps: int) -> list[Tensor]:
    _, wrapped, installed, grad = _installed(engine, scaler=None)
    found = []
    for step in range(num_steps):
        _loss(wrapped, rank, step).backward()
        found.append(grad().clone())
        wrapped.zero_grad()
    installed.uninstall()
    return found


def _check_by_hand(rank: int, engine: str) -> None:
    expected = _unscaled(rank, engine, len(SCALES))
    hand = _ByHand()
    _, wrapped, installed, grad = _installed(engine, scaler=hand)
    for step, hand.scale in enumerate(SCALES):
        (_loss(wrapped, rank, step) * hand.scale).backward()
        assert torch.equal(grad() / hand.scale, expected[step]), step
        wrapped.zero_grad()
    assert not torch.equal(expected[1] / 1.1, expected[0])  # a residual was added
    state = installed.state_dict()["residuals"][0]
    numel = installed.residuals[0].layout.shard_numel
    decoded = zcomm._residuals.residual.decode_state(state)[:, :numel]
    installed.residuals[0].commit()
    assert torch.equal(decoded, installed.residuals[0].values())
    assert 0 < float(decoded.abs().max()) < float(expected[-1].abs().max())  # without the scale of 2^20
    again = Residual(
        topology(2), state["layout"]["spans"], state["layout"]["numel"], numbering=state["layout"]["numbering"]
    )
    again.load_state_dict(state)
    again.set_loss_scale(8.0)
    assert torch.equal(again.values(), decoded)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_scale_that_changes_is_not_seen_in_gradients(engine: str) -> None:
    run_ranks(4, _check_by_hand, engine)


def _check_grad_scaler(rank: int, is_given: bool) -> None:  # noqa: FBT001
    """GradScaler with consecutive overflows and growth: steps that are not skipped equal those of a run without it."""
    skipped = (3, 4, 5, 6, 10)
    model, wrapped, installed, grad = _installed("ddp", scaler="auto")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    if is_given:
        others = [torch.amp.GradScaler("cpu") for _ in range(2)]
        for other in others:
            other.scale(torch.ones(()))
        installed.uninstall()
        model, wrapped, installed, grad = _installed("ddp", scaler=scaler)
    optimizer, scales, got = torch.optim.SGD(model.parameters(), lr=0.0), [], []
    num_taken = 0
    for step in range(14):
        loss = _loss(wrapped, rank, num_taken)
        if step in skipped:
            loss = loss * (float("inf") if rank == 1 else 1.0)
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step not in skipped:
            got.append(grad().clone())
            num_taken += 1
        scaler.step(optimizer)
        if is_given:
            installed.state_dict()  # which changes nothing, also after a skipped step
        scaler.update()
        optimizer.zero_grad()
        if is_given:
            installed.state_dict()
    assert len(set(scales)) > 4
    installed.uninstall()
    expected = _unscaled(rank, "ddp", num_taken)
    assert all(torch.equal(mine, exact) for mine, exact in zip(got, expected, strict=True))


@pytest.mark.parametrize("is_given", [False, True])
def test_a_grad_scaler_is_found_or_given(is_given: bool) -> None:  # noqa: FBT001
    run_ranks(4, _check_grad_scaler, is_given)


def _check_windows(rank: int, engine: str) -> None:
    """Two exchanges a step: a skipped step takes back what both have lost, whichever of them overflows."""
    expected = _unscaled(rank, engine, 8)
    model, wrapped, installed, grad = _installed(engine, scaler="auto")
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**10), torch.optim.SGD(model.parameters(), lr=0.0)
    num_taken = 0
    for first, second in ((1, 1), (1, float("inf")), (1, 1), (float("inf"), 1), (1, 1), (1, 1)):
        for batch, factor in enumerate((first, second)):
            loss = _loss(wrapped, rank, num_taken + batch) * (factor if rank == 1 else 1)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            if first * second == 1:
                assert torch.equal(grad() / scale, expected[num_taken + batch]), (num_taken, batch)
            wrapped.zero_grad()
            if batch == 0:
                installed.state_dict()  # changes nothing
        for parameter in wrapped.parameters():
            parameter.grad = torch.full_like(parameter, first * second)
        scaler.step(optimizer)
        scaler.update()
        wrapped.zero_grad()
        num_taken += 2 if first * second == 1 else 0
    assert num_taken == 8
    assert scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_exchanges_of_a_skipped_step_are_taken_back_together(engine: str) -> None:
    run_ranks(4, _check_windows, engine)


def _check_several(rank: int) -> None:
    _, wrapped, installed, _ = _installed("ddp")
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0) for _ in range(2)]
    losses = [scaler.scale(_loss(wrapped, rank, 0)) for scaler in scalers]
    with pytest.raises(ConfigError, match=r"2 GradScalers are in use.*pass scaler="):
        sum(losses).backward()
    installed.uninstall()
    with pytest.raises(ConfigError, match="scaler must be 'auto', None, or a"):
        _installed("ddp", scaler=3.5)
    with pytest.raises(ConfigError, match="scaler is"):
        _installed("ddp", scaler=_ByHand() if rank else None)


def test_several_scalers_and_what_is_none_are_refused() -> None:
    run_ranks(4, _check_several)


def test_which_scalers_are_found() -> None:
    gc.collect()
    forgotten: list[int] = []
    scaling = UserLossScale("auto", lambda: forgotten.append(1))
    assert scaling.current_scale(0) == 1
    unused, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    assert [scaling.current_scale(0) for _ in range(3)] == [1, 1, 1]  # the 2nd and 4th exchange look
    late = torch.amp.GradScaler("cpu", init_scale=4.0)
    late.scale(torch.ones(()))
    assert [scaling.current_scale(0) for _ in range(4)] == [1, 1, 1, 4]
    assert forgotten == [1]
    late.update(16.0)
    assert scaling.current_scale(0) == 16
    assert not unused.is_enabled() or off.get_scale() == 1
    first = UserLossScale("auto", lambda: forgotten.append(2))
    assert first.current_scale(0) == 16
    assert forgotten == [1]


class _Slotted(torch.amp.GradScaler):
    """A script's own kind."""

    __slots__ = ("own",)


class _Derived(_Slotted):
    pass


def test_a_scaler_is_looked_for_once_a_round_and_derived_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk over all objects holds up the ranks that wait: one in a step, not one for each bucket."""
    gc.collect()
    walks, walk = [0], gc.get_referrers

    def count(*kinds: type) -> list[Any]:
        walks[-1] += 1
        return walk(*kinds)

    monkeypatch.setattr(gc, "get_referrers", count)
    scaling = UserLossScale("auto", lambda: None)
    for _ in range(9):
        assert all(scaling.current_scale(bucket) == 1 for bucket in range(30))
        walks.append(0)
    assert walks == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0]
    late = _Derived("cpu", init_scale=32.0)
    late.scale(torch.ones(()))
    for _ in range(7):
        scales = {scaling.current_scale(bucket) for bucket in range(30)}
    assert scales == {32}


def test_scales_that_say_nothing_forget_what_is_held() -> None:
    for bad in (0.0, float("inf"), float("nan")):
        for kind in (float, torch.tensor):
            residual = Residual(zcomm.Topology.single(), [("w", 0, 600)], 600)
            residual.set_values(torch.randn(1, 600))
            residual.set_loss_scale(kind(bad))
            residual.set_loss_scale(kind(2.0))
            assert not residual.values().any()


def test_a_scale_may_be_a_tensor_and_waits_for_nothing_else() -> None:
    values, residual = torch.randn(1, 600), Residual(zcomm.Topology.single(), [("w", 0, 600)], 600)
    residual.set_values(values)
    before, held = residual.values(), residual.state_dict()
    scale = torch.tensor(2.0**14)
    residual.set_loss_scale(scale)
    scale.fill_(2.0**10)  # as a GradScaler's is, in place
    raw = residual._current.decode(0, 600)
    assert torch.equal(raw, before * 2.0**14)
    residual.set_loss_scale(scale)
    assert torch.equal(residual._current.decode(0, 600), before * 2.0**10)
    assert torch.equal(residual.values(), before)
    assert torch.equal(residual.state_dict()["scales"], held["scales"])


def test_a_step_that_was_skipped_is_taken_back_on_a_device_that_no_host_waits_for() -> None:
    one = zcomm.Topology.single()
    for unless, is_kept in ((torch.tensor(True), False), (torch.tensor(False), True), (True, False), (False, True)):
        residual = Residual(one, [("w", 0, 600)], 600)
        residual.set_values(torch.randn(1, 600))
        before = residual.values()
        zcomm.reduce_scatter_single(torch.empty(600), torch.randn(600), group=one, format="int4", residual=residual)
        residual.commit(unless=unless)
        assert residual.is_committed
        assert torch.equal(residual.values(), before) != is_kept
