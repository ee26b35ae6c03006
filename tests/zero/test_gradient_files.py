"""Reduced gradients in files: bytes moved and held, norms and edits, and failing reads and writes."""

# covers zero/_optim/gradient_files.py zero/_optim/state_files.py zero/_optim/sub_groups.py
# covers zero/_storage/host_gradient.py zero/_storage/state_storage.py

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.broken import Breaks
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import StateError
from zero._storage.transfer_counters import moved

LAST = 1
PAGE = 4096


def _options(folder: str | None, **options: Any) -> dict[str, Any]:
    """Sub-groups that cut parameters, in files or, without a folder, in memory."""
    common = {"lr": 1e-2, "bf16": {"enabled": True}, "sub_group_size": 1601, **options}
    if folder is None:
        return common
    return common | {"offload_optimizer": {"device": "nvme", "nvme_path": folder, "pipeline_write": True}}


def _check_bytes(rank: int, folder: str) -> None:
    """A sub-group is a page of bf16, so nothing is rounded up. Bytes are read once, by a sum or by the update."""
    numel, options = 64 * 1024 // 2, _options(folder, sub_group_size=PAGE // 2)
    for stage, num_micro in ((2, 1), (3, 3)):
        model = nn.Sequential(nn.Linear(64, 1024, bias=False))
        with zero_optimizer(model, zero.CPUAdam, stage=stage, **options) as optimizer:
            for _ in range(2):
                with moved() as window:
                    for _ in range(num_micro):
                        model(torch.full((2, 64), rank + 1.0).bfloat16()).sum().backward()
                    report = optimizer.memory()
                    optimizer.step()
                    optimizer.zero_grad()
                assert window.bytes(kind="gradients", link="to_host") == 2 * numel * num_micro
                assert window.bytes(kind="gradients", link="write") == (2 + 4 * (num_micro - 1)) * numel
                assert window.bytes(kind="gradients", link="read") == (2 + 4 * (num_micro - 1)) * numel
                assert report.gradients == 0
                assert report.gradients_in_files == 4 * numel
                assert report.buffers["gradients on their way"] <= 4 * (1 + 2) * PAGE < 2 * numel


def test_gradients_move_once_and_are_not_held(tmp_path: Path) -> None:
    run_ranks(2, _check_bytes, str(tmp_path))


def _use(rank: int, folder: str | None, stage: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Do all that a user may do with gradients between backward and step; return the values and the parameters."""
    model, seen = new_model(), []
    with zero_optimizer(model, zero.CPUAdam, stage=stage, **_options(folder)) as optimizer:
        for step in range(2):
            for micro in range(2):
                loss_of(model, *batch(step, micro, rank)).backward()
            seen.append(optimizer.clip_grad_norm_(math.inf, math.inf).item())
            seen.append(optimizer.clip_grad_norm_(0.5).item())
            weight, bias = model.blocks[1].mlp[0].weight, model.shared.bias
            seen.append(zero.utils.safe_get_full_grad(weight))
            zero.utils.safe_set_full_grad(bias, torch.linspace(-1, 1, bias.numel()))
            seen.append(zero.utils.safe_get_full_grad(bias))
            model.norm.zero_grad()
            model.norm.weight.grad = None
            loss_of(model, *batch(step, 2, rank)).backward()
            seen.append(zero.utils.safe_get_full_grad(model.norm.weight))
            optimizer.step()
            optimizer.zero_grad()
        return seen, full_values(model)


def _check_use(rank: int, folder: str) -> None:
    for stage in (1, 3):
        expected, got = _use(rank, None, stage), _use(rank, folder, stage)
        for one, other in zip(expected[0], got[0], strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        assert_same_bits(expected[1], got[1])


def test_norms_and_edits_are_those_of_gradients_in_memory(tmp_path: Path) -> None:
    run_ranks(2, _check_use, str(tmp_path))


def _backwards(model: nn.Module, rank: int) -> None:
    for micro in range(2):
        loss_of(model, *batch(1, micro, rank)).backward()


def _check_failure(rank: int, folder: str) -> None:
    options = _options(folder, stage=2, gradient_accumulation_steps=2)
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
        _backwards(model, rank)
        optimizer.step()
        expected = full_values(model)
    for verb, at, fails_in_step in (("write", 2, False), ("read", 3, False), ("read", 2, True)):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, **options) as optimizer:
            store, before = optimizer.parts.runtime.state_files.gradients.store, full_values(model)
            if fails_in_step:
                _backwards(model, rank)
            call = getattr(store, verb)
            if rank == LAST:
                setattr(store, verb, Breaks(call, at, OSError(5, "broken disk", "disk")))
            with pytest.raises(OSError, match="broken disk"):
                (optimizer.step if fails_in_step else lambda m=model: _backwards(m, rank))()
            setattr(store, verb, call)
            assert_same_bits(full_values(model), before)
            if not fails_in_step:
                _backwards(model, rank)
            optimizer.step()
            assert_same_bits(full_values(model), expected)


def test_a_failing_disk_is_an_error_on_every_rank_and_the_step_can_be_tried_again(tmp_path: Path) -> None:
    """Disks fail while gradients are written, while they are summed, and while the update reads them."""
    run_ranks(2, _check_failure, str(tmp_path))
    assert not list(tmp_path.iterdir())


def _check_stand_in(rank: int, folder: str) -> None:
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, stage=2, **_options(folder)) as optimizer:
        loss_of(model, *batch(0, 0, rank)).backward()
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with pytest.raises(StateError, match=r"in files of every rank.*clip_grad_norm_"):
            torch.stack([grad.norm() for grad in grads])


def test_a_gradient_in_a_file_is_no_number(tmp_path: Path) -> None:
    """Reading the gradients of masters, as torch.amp.GradScaler does, raises an error that says where they are."""
    run_ranks(2, _check_stand_in, str(tmp_path))
