"""An optimizer of whole tensors beside one of zero's own: the others' update is fused, and the steps are the same."""

# covers zero/_optim/step_pieces.py zero/_optim/file_update.py zero/_optim/host_adam.py zero/_optim/updaters.py

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import zcomm
import zero
from tests.ranks import by_first_rank, run_ranks, topology
from tests.zero.models import as_vector, batch, loss_of, new_model, relative_error
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from tests.zero.whole_optimizers import WideMuon, matrices_and_others
from zero.utils import safe_get_full_fp32_param

CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
MAX_NORM = 0.3
REPLACED = "zero's CPUAdam in place of the torch.optim.AdamW that was given"


def _built(model: nn.Module, adam: Any = AdamW, **options: Any) -> list[Optimizer]:
    matrices, others = matrices_and_others(model)
    groups = [{"params": others[::2]}, {"params": others[1::2], "weight_decay": 0.0}]
    return [WideMuon(matrices, lr=0.02, weight_decay=0.1), adam(groups, lr=3e-3, weight_decay=0.1, **options)]


def _in_files(folder: str, **options: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": folder}, **options}


def _alone(world_size: int, steps: int) -> Tensor:
    """The parameters of one process, with the batches of all ranks, each optimizer with a schedule of its own."""
    model = new_model()
    optimizers = _built(model)
    schedules = [LambdaLR(one, lambda step, i=i: 1 / (1 + i + step)) for i, one in enumerate(optimizers)]
    for step in range(steps):
        for rank in range(world_size):
            (loss_of(model, *batch(step, 0, rank)) / world_size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for one in (*optimizers, *schedules):
            one.step()
        model.zero_grad()
    return as_vector(model.parameters())


def _check_alone(rank: int, folder: str) -> None:
    expected = by_first_rank(partial(_alone, torch.distributed.get_world_size(), 4))
    hpz = {"stage": 3, "mode": "delta_hpz", "gradient_format": ("none", "none"), "weight_format": "none"}
    cases = [
        {"stage": 1, **CPU},
        {"stage": 2, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000, **CPU},
        {"stage": 3, "stage3_param_persistence_threshold": 0, **CPU},
        {"stage": 2, **_in_files(folder)},
        {"stage": 3, **_in_files(folder, sub_group_size=2000)},
        {**hpz, **CPU},
        {"stage": 2, "given": zero.CPUAdam},  # masters are on the device, which is the host
        {"stage": 0, "given": zero.CPUAdam},
        {**hpz, "given": zero.CPUAdam},
    ]
    for case in cases:
        options, model = dict(case), new_model()
        optimizers = _built(model, options.pop("given", AdamW))
        schedules = [LambdaLR(one, lambda step, i=i: 1 / (1 + i + step)) for i, one in enumerate(optimizers)]
        with zero_optimizer(model, optimizers, ranks_per_node=2, **options) as optimizer:
            for step in range(4):
                loss_of(model, *batch(step, 0, rank)).backward()
                assert optimizer.clip_grad_norm_(MAX_NORM) > MAX_NORM
                optimizer.step()
                optimizer.zero_grad()
                for schedule in schedules:
                    schedule.step()
            assert (REPLACED in str(optimizer.effective)) is ("offload_optimizer" in options), optimizer.effective
            got = as_vector(full_values(model).values())
        assert relative_error(got, expected) < 1e-5, case


def test_as_one_process(tmp_path: Path) -> None:
    run_ranks(4, _check_alone, str(tmp_path))


def _trained(rank: int, given: Any, patch: pytest.MonkeyPatch, **options: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """Masters after 4 steps in float16, with a loss scale; and the factors of the fused passes."""
    factors, step = list[Any](), zero.CPUAdam.step_tensor_

    def step_tensor_(self: Any, param: Tensor, grad: Tensor, group: Any, **rest: Any) -> None:
        if rest:  # not the trial that finds the states
            assert rest["out"].dtype == torch.float16
            factors.append((grad.dtype, rest["grad_factor"]))
        step(self, param, grad, group, **rest)

    patch.setattr(zero.CPUAdam, "step_tensor_", step_tensor_)
    model = new_model()
    fp16 = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}
    with zero_optimizer(
        model, _built(model, given), ranks_per_node=2, fp16=fp16, gradient_clipping=MAX_NORM, **options
    ) as optimizer:
        train(model, optimizer, rank, steps=4)
        masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
        for name, value in full_values(model).items():
            assert torch.equal(value, masters[name].half()), f"{name} is not the rounded master"
    patch.setattr(zero.CPUAdam, "step_tensor_", step)
    return masters, factors


def _check_folded(rank: int, folder: str) -> None:
    """Unscaling, clipping and the 16-bit parameters are part of the fused pass, with the result of separate passes."""
    with pytest.MonkeyPatch.context() as patch:
        for place in (CPU, _in_files(folder)):
            apart, none = _trained(rank, AdamW, patch, stage=2, zero_force_ds_cpu_optimizer=False, **place)
            fused, factors = _trained(rank, AdamW, patch, stage=2, **place)
            assert not none
            counts = zcomm.control.gather_float64(torch.tensor([float(len(factors))]), topology(2))
            assert counts.sum() > 0  # some ranks have matrices only
            assert all(dtype == torch.float16 and factor < 2**-10 for dtype, factor in factors), factors
            assert relative_error(as_vector(fused.values()), as_vector(apart.values())) < 1e-5, place


def test_scaling_and_clipping_are_folded(tmp_path: Path) -> None:
    run_ranks(4, _check_folded, str(tmp_path))


def _check_narrow(rank: int, folder: str) -> None:
    """Moments in bfloat16 are rounded by the same random numbers in memory, in files, and during the next step."""
    ends = []
    for options in ({}, CPU, _in_files(folder, sub_group_size=2000)):
        model = new_model(torch.bfloat16)
        given = _built(model, zero.CPUAdam, fp32_optimizer_states=False)
        with zero_optimizer(model, given, ranks_per_node=2, stage=3, gradient_format="none", **options) as optimizer:
            train(model, optimizer, rank, steps=3)
            if options:
                assert "moments are stored in bfloat16" in str(optimizer.effective)
            ends.append(full_values(model))
    for end in ends[1:]:
        assert relative_error(as_vector(end.values()), as_vector(ends[0].values())) < 2e-3
    assert_same_bits(ends[1], ends[2])


def test_narrow_moments(tmp_path: Path) -> None:
    run_ranks(2, _check_narrow, str(tmp_path))


def _check_delayed(rank: int) -> None:
    """Every update one step late, with the same values as torch's optimizers have one step late."""
    ends = []
    for is_forced in (True, False):
        model = new_model()
        options = {**CPU, "delayed_update": True, "delay_start": 0, "zero_force_ds_cpu_optimizer": is_forced}
        with zero_optimizer(model, _built(model), ranks_per_node=2, stage=2, **options) as optimizer:
            train(model, optimizer, rank, steps=3, max_norm=MAX_NORM)
            optimizer.finish_update()
            ends.append(as_vector(full_values(model).values()))
    assert relative_error(ends[0], ends[1]) < 1e-5


def test_delayed_updates() -> None:
    run_ranks(2, _check_delayed)


def _check_checkpoint(rank: int, folder: str) -> None:
    """Saved by torch's AdamW on the device, loaded by CPUAdam in its place, and the other way round."""
    expected, ends = None, []
    for saves, loads in (({}, {}), ({}, CPU), (CPU, {})):
        tag = f"{len(ends)}"
        model = new_model()
        with zero_optimizer(model, _built(model), ranks_per_node=2, stage=2, **saves) as optimizer:
            train(model, optimizer, rank, steps=2)
            zero.save_checkpoint(optimizer, folder, tag)
        model = new_model(seed=3)
        with zero_optimizer(model, _built(model), ranks_per_node=2, stage=3, **loads) as optimizer:
            zero.load_checkpoint(optimizer, folder, tag)
            train(model, optimizer, rank, steps=2)
            ends.append(as_vector(full_values(model).values()))
        expected = ends[0] if expected is None else expected
        assert relative_error(ends[-1], expected) < 1e-5, (saves, loads)
    model = new_model()
    matrices, others = matrices_and_others(model)
    swapped = [WideMuon(matrices), torch.optim.SGD(others, lr=0.1)]
    with (
        zero_optimizer(model, swapped, ranks_per_node=2, stage=2, **CPU) as optimizer,
        pytest.raises(zero.CheckpointError, match=r"the optimizer is WideMuon \+ AdamW in the checkpoint"),
    ):
        zero.load_checkpoint(optimizer, folder, "0")
    assert math.isfinite(float(expected.norm()))


def test_checkpoints_between_torchs_adam_and_zeros(tmp_path: Path) -> None:
    run_ranks(2, _check_checkpoint, str(tmp_path))
