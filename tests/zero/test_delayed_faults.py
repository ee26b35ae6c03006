"""Delayed updates that are skipped or fail: the same on every rank, and never half applied."""

# covers zero/optimizer.py

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zero
from tests.broken import Breaks
from tests.ranks import run_ranks
from tests.zero.delayed import CPU, LAST, masters_of, nvme, train_late
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zcomm import StateError


def _check_overflow(rank: int) -> None:
    model = new_model()
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, fp16=fp16, **CPU) as optimizer:
        for step in range(5):
            loss = loss_of(model, *batch(step, 0, rank))
            optimizer.scale(loss * float("inf") if (step, rank) == (2, LAST) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.was_step_applied == (step != 2)
            parameters = full_values(model)
            lacks = [name for name, value in masters_of(model).items() if not torch.equal(value, parameters[name])]
            assert bool(lacks) == (step != 2), "a skipped step publishes the update before, and begins none"
            assert not any(value.isnan().any() for value in parameters.values())
        assert zero.utils.safe_get_full_optimizer_state(model.head.weight, "step") == 4
        assert optimizer.loss_scale.scale == 2**9


def test_a_skipped_step_begins_no_update() -> None:
    run_ranks(2, _check_overflow)


def _check_failure_in_files(rank: int, folder: str) -> None:
    """The next step raises on every rank, and state is that before the failed update; a retry loses nothing."""
    case = nvme(folder, stage=2, bf16={"enabled": True}, gradient_clipping=0.05)
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **case) as optimizer:
        expected, masters = train_late(model, optimizer, rank, range(4)), masters_of(model)
    for verb, at in (("write", 3), ("read", 2)):
        model = new_model()
        with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **case) as optimizer:
            losses, store = train_late(model, optimizer, rank, range(1)), optimizer.parts.runtime.state_files.store
            zero.utils.safe_get_full_fp32_param(model.head.weight)  # the first update is complete
            before, call = full_values(model), getattr(store, verb)
            if rank == LAST:
                setattr(store, verb, Breaks(call, at, OSError(28, "no space", "disk")))
            losses += train_late(model, optimizer, rank, range(1, 2))
            published = full_values(model)
            loss = loss_of(model, *batch(2, 0, rank))
            loss.backward()
            with pytest.raises(OSError, match="no space"):
                optimizer.step()
            setattr(store, verb, call)
            assert_same_bits(full_values(model), published)
            assert not torch.equal(published["wte.weight"], before["wte.weight"])
            optimizer.step()
            losses += [loss.item(), *train_late(model, optimizer, rank, range(3, 4))]
            assert losses == expected
            assert_same_bits(masters_of(model), masters)


def test_an_update_of_files_that_failed_is_tried_again(tmp_path: Path) -> None:
    run_ranks(2, _check_failure_in_files, str(tmp_path))


def _check_failure_in_memory(rank: int, folder: str) -> None:
    """A failed update in memory makes the optimizer unusable on every rank; the files from before it can be loaded."""
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, stage=2, **CPU) as optimizer:
        train_late(model, optimizer, rank, range(2))
        inner = optimizer.parts.inner
        zero.utils.safe_get_full_fp32_param(model.head.weight)
        if rank == LAST:
            inner.step_tensor_ = Breaks(inner.step_tensor_, 2, MemoryError("no memory left"))
        train_late(model, optimizer, rank, range(2, 3))
        for match in ("no memory left", r"load the last checkpoint.*no memory left"):
            loss_of(model, *batch(3, 0, rank)).backward()
            with pytest.raises((MemoryError, StateError), match=match):
                optimizer.step()
            optimizer.zero_grad()
    model = new_model()
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **nvme(folder, stage=2)) as optimizer:
        train_late(model, optimizer, rank, range(2))
        zero.save_checkpoint(optimizer, folder, "two")
        expected = train_late(model, optimizer, rank, range(2, 4))
        store = optimizer.parts.runtime.state_files.store
        zero.utils.safe_get_full_fp32_param(model.head.weight)
        call = store.write
        if rank == LAST:
            store.write = Breaks(call, 1, OSError(28, "no space", "disk"))
        train_late(model, optimizer, rank, range(4, 5))
        with pytest.raises(OSError, match="no space"):
            optimizer.finish_update()
        store.write = call
        zero.load_checkpoint(optimizer, folder)  # drops the failed update
        assert train_late(model, optimizer, rank, range(2, 4)) == expected


def test_an_update_in_memory_that_failed_is_the_last(tmp_path: Path) -> None:
    run_ranks(2, _check_failure_in_memory, str(tmp_path))
