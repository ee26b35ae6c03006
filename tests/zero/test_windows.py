"""Accumulation windows of an engine: each step has all its micro-batches, also after the number of them changes."""

# covers zero/engine.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from zero.compat import engine


class Raising(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004  (torch's signature)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        raise RuntimeError("no memory")


def _check_windows(rank: int, folder: str) -> None:
    def build(accumulation: int) -> Any:
        model = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(model.weight)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": 2},
        }
        return engine.initialize(None, model, None, None, config=config)[0]

    def steps_at(built: Any, num: int) -> list[int]:
        found = []
        for micro in range(num):
            before = built.module.weight.detach().clone()
            assert built.backward(built(torch.ones(1, 8)).sum()) is not None
            built.step()
            if not torch.equal(moved := before - built.module.weight.detach(), torch.zeros(1, 8)):
                assert torch.equal(moved, torch.ones(1, 8))
                found.append(micro)
        return found

    first = build(1)
    assert steps_at(first, 3) == [0, 1, 2]
    first.set_train_batch_size(4)  # two ranks, so two micro-batches each
    assert steps_at(first, 4) == [1, 3]
    first.set_train_batch_size(6)
    assert steps_at(first, 6) == [2, 5]
    assert steps_at(first, 1) == []  # a save leaves it out
    first.save_checkpoint(folder)
    assert first.micro_steps == 14
    assert first.load_checkpoint(f"{folder}/none").path is None
    assert steps_at(first, 2) == [1]  # nothing was loaded, so the window has three
    assert steps_at(first, 1) == []
    hook = first.module.register_forward_pre_hook(lambda _, inputs: (Raising.apply(inputs[0].requires_grad_()),))
    with pytest.raises(RuntimeError, match="no memory"):
        first.backward(first(torch.ones(1, 8)).sum())
    hook.remove()
    assert steps_at(first, 3) == [2]  # what came before the error is dropped
    for options in ({}, {"load_module_only": True}):
        first.load_checkpoint(folder, **options)
        assert steps_at(first, 4) == [2]
    first.destroy()
    for accumulation, expected in ((3, [2, 5]), (2, [1, 3, 5]), (4, [3])):
        again = build(accumulation)
        again.load_checkpoint(folder)
        assert again.micro_steps == 13
        assert steps_at(again, 6) == expected
        again.destroy()


def test_windows_start_anew_after_a_change_and_a_load(tmp_path: Path) -> None:
    run_ranks(2, _check_windows, str(tmp_path))
