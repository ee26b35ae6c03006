"""Checks of both modes that send changes of parameters, ``mode="delta"`` and ``mode="delta_hpz"``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.zero.models import as_vector, batch, groups_of, loss_of, new_model, relative_error
from tests.zero.training import assert_same_bits, full_values, train
from zcomm import control
from zero import GatheredParameters, ZeroOptimizer
from zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

OptimizerFor = Callable[..., AbstractContextManager[ZeroOptimizer]]
"""``zero_optimizer`` with the options of a mode: a partial, which can be sent to ranks."""


# What ranks hold.


def replicas_of(optimizer: ZeroOptimizer) -> Tensor:
    """All replicas of this rank, one after the other."""
    replicas = optimizer.parts.runtime.gatherer.replicas
    return torch.cat([replicas[index].node.values.flatten() for index in sorted(replicas)])


def residuals_of(optimizer: ZeroOptimizer) -> Tensor:
    """All committed residuals of this rank."""
    return torch.cat([one.values().flatten() for one in optimizer.parts.runtime.reducer.reduction.residuals])


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    """All full masters, float32."""
    masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    assert all(master is not None for master in masters.values())
    return masters  # type: ignore[return-value]


def everything_of(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Full parameters, and this rank's masters, replicas and residuals."""
    masters = [values.flatten() for _, _, values in optimizer.master_pieces()]
    found = full_values(model) | {"masters": torch.cat([torch.empty(0), *masters])}
    if optimizer.effective.mode == "delta_hpz":
        found |= {"replicas": replicas_of(optimizer), "residuals": residuals_of(optimizer)}
    return found


def check_ranks_agree(optimizer: ZeroOptimizer) -> None:
    """Under ``delta``: all ranks must hold the same bits."""
    full = torch.cat([b.full for b in optimizer.parts.runtime.buckets if b.full is not None])
    of_ranks = control.gather_float64(full.detach().double(), optimizer.topology)
    for values in of_ranks:
        assert torch.equal(values, of_ranks[0])


def check_nodes_agree(optimizer: ZeroOptimizer) -> None:
    """Under ``delta_hpz``: ranks with equal local rank must hold the same bits."""
    mine, t = replicas_of(optimizer).double(), optimizer.topology
    numel = int(control.gather_float64(torch.tensor([float(mine.numel())]), t).max())  # local ranks' may differ
    padded = nn.functional.pad(mine, (0, numel - mine.numel()), value=math.inf)
    of_nodes = control.gather_float64(padded, t).view(t.num_nodes, -1)
    for values in of_nodes:
        assert torch.equal(values, of_nodes[0])


def check_agreement(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """All ranks must read the same values; under these modes they must hold the same, too."""
    got = as_vector(full_values(model).values())
    of_ranks = control.gather_float64(got, optimizer.topology)
    assert (of_ranks == of_ranks[0]).all(), "ranks differ"
    if optimizer.effective.mode == "delta_hpz":
        check_nodes_agree(optimizer)
    elif optimizer.effective.mode == "delta":
        check_ranks_agree(optimizer)


def check_parameters_are_the_masters(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """What ranks read must be the masters, rounded once."""
    masters = masters_of(model)
    for name, value in full_values(model).items():
        assert torch.equal(value, masters[name].to(value.dtype)), f"{name} is not its master"
    check_agreement(model, optimizer)


# Checks of training. Each is called on four ranks.


def check_writes(rank: int, optimizer_for: OptimizerFor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes outside of steps, and loading, make parameters the masters again; masters are saved."""
    model = new_model(dtype)
    with optimizer_for(model) as optimizer:
        check_parameters_are_the_masters(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, rank, steps=2)
        with pytest.raises(AssertionError, match="is not its master"):
            check_parameters_are_the_masters(model, optimizer)
        with GatheredParameters(list(model.parameters()), modifier_rank=1), torch.no_grad():
            model.blocks[0].mlp[0].weight.mul_(1.7)
        check_parameters_are_the_masters(model, optimizer)
        train(model, optimizer, rank, steps=1)
        check_agreement(model, optimizer)
        for param in model.parameters():
            value = safe_get_full_fp32_param(param)
            assert value is not None
            safe_set_full_fp32_param(param, value * 1.1)
        check_parameters_are_the_masters(model, optimizer)
        train(model, optimizer, rank, steps=1)
        masters = {name: master.to(dtype) for name, master in masters_of(model).items()}
        state = model.state_dict()  # collective; masters are saved, not what ranks read
        if rank == 0:
            assert_same_bits({name: state[name] for name in masters}, masters)
        optimizer.load_state_dict(saved)
        check_parameters_are_the_masters(model, optimizer)


def check_an_overflow_changes_nothing(
    model: nn.Module,
    optimizer: ZeroOptimizer,
    rank: int,
    everything: Callable[[nn.Module, ZeroOptimizer], dict[str, Tensor]] = everything_of,
) -> None:
    """An infinite loss on rank 2: the step is not applied, on any rank."""
    before = everything(model, optimizer)
    optimizer.scale(loss_of(model, *batch(7, 0, rank)) * (float("inf") if rank == 2 else 1.0)).backward()
    optimizer.step()
    assert not optimizer.was_step_applied
    optimizer.zero_grad()
    assert_same_bits(everything(model, optimizer), before)


def check_drift(rank: int, optimizer_for: OptimizerFor) -> None:
    """Parameters must not drift from the masters: their distance stays of the order of bfloat16's rounding."""
    model, distances = new_model(torch.bfloat16), []
    with optimizer_for(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) as optimizer:
        for _ in range(4):
            train(model, optimizer, rank, steps=10)
            exact = as_vector(masters_of(model).values())
            distances.append(relative_error(as_vector(full_values(model).values()), exact))
        check_agreement(model, optimizer)
    assert max(distances) <= 1.1 * distances[0] < 0.01, distances


def check_offload(rank: int, folder: str, optimizer_for: OptimizerFor, num_micro: int) -> None:
    """States in host memory or in files, and zero's own optimizer: the same bits as on the device."""

    def values(optimizer_class: Any, **options: Any) -> dict[str, Tensor]:
        model = new_model(torch.bfloat16, has_unused=True)
        inner = optimizer_class(groups_of(model), lr=1e-2)
        with optimizer_for(model, inner, gradient_accumulation_steps=num_micro, **options) as optimizer:
            train(model, optimizer, rank, steps=3, num_micro=num_micro)
            check_agreement(model, optimizer)
            return full_values(model)

    device = values(torch.optim.AdamW)
    assert_same_bits(values(torch.optim.AdamW, data_types={"grad_accum_dtype": "fp32"}), device)
    host = values(zero.CPUAdam, offload_optimizer={"device": "cpu"})
    assert relative_error(as_vector(host.values()), as_vector(device.values())) < 0.05
    assert_same_bits(values(zero.CPUAdam, offload_optimizer={"device": "nvme", "nvme_path": folder}), host)


# Checkpoints.

ResidualSums = Callable[[ZeroOptimizer], dict[str, Tensor]]
"""The sum of each parameter's residuals over all ranks."""


def check_goes_on_from_a_checkpoint(
    rank: int, folder: str, optimizer_for: OptimizerFor, residual_sums: ResidualSums
) -> None:
    """Training goes on with the same bits from a ``state_dict`` and from a checkpoint; leaves what other topologies
    must find in ``expected.pt``."""
    model, again = (new_model(torch.bfloat16, has_frozen=True, seed=seed) for seed in (0, 5))
    with optimizer_for(model) as optimizer:
        train(model, optimizer, rank, steps=3)
        zero.save_checkpoint(optimizer, folder, "three")
        saved, sums, state = full_values(model), residual_sums(optimizer), copy.deepcopy(optimizer.state_dict())
        if rank == 0:
            torch.save({"values": saved, "sums": sums}, Path(folder) / "expected.pt")
        train(model, optimizer, rank, steps=2)
        expected = everything_of(model, optimizer)
        optimizer.load_state_dict(state)
        train(model, optimizer, rank, steps=2)
        assert_same_bits(everything_of(model, optimizer), expected)
    with optimizer_for(again) as optimizer:
        train(again, optimizer, rank, steps=1)
        zero.load_checkpoint(optimizer, folder)
        assert_same_bits(full_values(again), saved)
        train(again, optimizer, rank, steps=2)
        assert_same_bits(everything_of(again, optimizer), expected)


def check_goes_on_elsewhere(
    rank: int,
    folder: str,
    optimizer_for: OptimizerFor,
    mode: dict[str, Any],
    others: Sequence[dict[str, Any]],
    residual_sums: ResidualSums,
) -> None:
    """On other ranks: under the same ``mode`` the same values and sums of residuals; ``others`` go on, too."""
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    for options in (mode, *others):
        model = new_model(torch.bfloat16, has_frozen=True, seed=5)
        with optimizer_for(model, **options) as optimizer:
            zero.load_checkpoint(optimizer, folder)
            if options is mode:
                assert_same_bits(full_values(model), expected["values"])
                check_agreement(model, optimizer)
                if mode["mode"] == "delta_hpz":
                    got = residual_sums(optimizer)
                    sums = as_vector(expected["sums"][name] for name in got)
                    assert sums.norm() > 0
                    assert relative_error(as_vector(got.values()), sums) < 0.02
            train(model, optimizer, rank, steps=1)
            check_agreement(model, optimizer)
