"""A step that failed on files and is retried counts once: in the loss scale, in accumulation, and in every bit."""

# covers zero/_runtime/write_back.py zero/_step/final_gradients.py zero/_step/update.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.broken import Breaks
from tests.ranks import run_ranks
from tests.zero.delayed import nvme
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer

LAST = 1
FP16: dict[str, Any] = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1, "hysteresis": 1}


def _fails(optimizer: zero.ZeroOptimizer, rank: int, *, waits: bool) -> Any:
    """Make one write of states fail on one rank; return how to undo that. ``waits``: for the update in flight."""
    store = optimizer.parts.runtime.state_files.store
    call = store.write
    if waits:
        zero.utils.safe_get_full_optimizer_state(optimizer.parts.runtime.buckets[0].params[0], "step")
    if rank == LAST:
        store.write = Breaks(call, 2, OSError(28, "no space", "disk"))
    return lambda: setattr(store, "write", call)


def _train(rank: int, folder: str, *, delayed: bool, fails_at: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Six steps of fp16, the fourth of which overflows; return the scale after each."""
    model, scales = new_model(), []
    options = nvme(folder, stage=2, fp16=FP16, gradient_clipping=0.5) | {"delayed_update": delayed}
    with zero_optimizer(model, zero.CPUAdam, lr=1e-2, **options) as optimizer:
        for step in range(6):
            loss = loss_of(model, *batch(step, 0, rank))
            optimizer.scale(loss * float("inf") if (step, rank) == (3, 0) else loss).backward()
            if step == fails_at:
                undo = _fails(optimizer, rank, waits=delayed)
                if not delayed:
                    with pytest.raises(OSError, match="no space"):
                        optimizer.step()
                    undo()
            elif step == fails_at + 1 and delayed:
                with pytest.raises(OSError, match="no space"):
                    optimizer.step()
                undo()
            optimizer.step()
            optimizer.zero_grad()
            scales.append(optimizer.loss_scale.state_dict())
        return scales, full_values(model)


def _check_scales(rank: int, folder: str) -> None:
    for delayed in (False, True):
        expected = _train(rank, folder, delayed=delayed, fails_at=-9)
        assert len({scale["scale"] for scale in expected[0]}) >= 3
        got = _train(rank, folder, delayed=delayed, fails_at=2)
        assert got[0] == expected[0]
        assert_same_bits(got[1], expected[1])


def test_a_retried_step_counts_once_for_the_loss_scale(tmp_path: Path) -> None:
    """With a delayed update the step after the failed one is retried, and that one is skipped."""
    run_ranks(2, _check_scales, str(tmp_path))


def _check_engine(rank: int, folder: str) -> None:
    """The ranks do not share a disk."""
    path = Path(folder) / f"disk{rank}"
    path.mkdir(exist_ok=True)
    tier = {"device": "nvme", "nvme_path": str(path)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": tier, "offload_param": tier | {"max_in_cpu": 0}},
    }
    ends = []
    for fails in (False, True):
        model = new_model()
        engine, optimizer, *_ = zero.initialize(model=model, config=config)
        for micro in range(6):
            engine.backward(loss_of(engine, *batch(micro, 0, rank)))
            if fails and micro == 3:
                undo = _fails(optimizer, rank, waits=True)
                with pytest.raises(OSError, match="no space"):
                    engine.step()
                undo()
                assert (engine.micro_steps, engine.global_steps) == (3, 1)
            engine.step()
        assert (engine.micro_steps, engine.global_steps) == (6, 3)
        assert len(list(path.glob("*"))) >= 3
        assert not list(Path(folder).glob("zero-*"))
        ends.append(full_values(model))
        engine.destroy()
    assert_same_bits(*ends)


def test_a_retried_engine_step_counts_once_and_each_rank_has_its_own_disk(tmp_path: Path) -> None:
    run_ranks(2, _check_engine, str(tmp_path))
