"""A checkpoint that is saved within a step has the state after the last one; the step that runs is not disturbed."""

# covers zero/_checkpoint/save.py zero/engine.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from tests.ranks import run_ranks
from tests.zero.logs import logged
from tests.zero.models import batch, loss_of, new_model
from zero import CheckpointError, utils

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "on the host": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "in files": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    "delayed": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zcomm": {"delayed_update": True},
    },
    "delta": {
        "zero_optimization": {"stage": 2},
        "zcomm": {"mode": "delta", "changes": "quantized", "ranks_per_node": 1},
    },
    "delta-hpZ": {"zero_optimization": {"stage": 3}, "zcomm": {"mode": "delta_hpz", "ranks_per_node": 1}},
}


def _engine(case: str, folder: Path, seed: int = 0) -> Any:
    config = {**CASES[case], "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "steps_per_print": 1000}
    zero_section = config["zero_optimization"]
    if case == "in files":
        offload = {**zero_section["offload_optimizer"], "nvme_path": str(folder)}
        config["zero_optimization"] = {**zero_section, "offload_optimizer": offload}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return zero.initialize(model=new_model(seed=seed), config={**config, "optimizer": optimizer}).engine


def _micro(engine: Any, rank: int, step: int, micro: int) -> None:
    engine.backward(loss_of(engine, *batch(step, micro, rank)))
    engine.step()


def _state(engine: Any) -> dict[str, Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = utils.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = utils.safe_get_full_optimizer_state(param, key)
    return found


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], case


def _check(rank: int, folder: Path, case: str) -> None:
    with logged() as texts:
        engine = _engine(case, folder)
        for micro in range(2):
            _micro(engine, rank, 0, micro)
        engine.save_checkpoint(folder, "between")
        _micro(engine, rank, 1, 0)
        assert sum("within a step" in text for text in texts) == 0
        for is_async, tag in enumerate(("within", "again")):
            engine.save_checkpoint(folder, tag, async_op=bool(is_async)).wait()
    assert sum("within a step" in text for text in texts) == (1 if rank == 0 else 0)
    assert engine.micro_steps == 3
    _micro(engine, rank, 1, 1)
    straight = _state(engine)
    engine.destroy()
    finals = {}
    for tag in ("between", "within", "again"):
        resumed = _engine(case, folder, seed=5)
        _micro(resumed, rank, 9, 0)
        resumed.load_checkpoint(folder, tag)
        assert (resumed.micro_steps, resumed.global_steps) == (2, 1)
        for micro in range(2):
            assert resumed.is_gradient_accumulation_boundary() == bool(micro)
            _micro(resumed, rank, 1, micro)
        finals[tag] = _state(resumed)
        resumed.destroy()
    for tag, final in finals.items():
        _assert_same(final, straight, f"{case}, {tag}")


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_within_a_step_is_the_state_after_the_last(tmp_path: Path, case: str) -> None:
    run_ranks(2, _check, tmp_path, case)


def _check_residuals(rank: int, folder: Path) -> None:
    """Between the last backward and step() residuals are those of gradients that no step has used."""
    engine = _engine("delta-hpZ", folder)
    for micro in range(2):
        _micro(engine, rank, 0, micro)
    _micro(engine, rank, 1, 0)
    engine.backward(loss_of(engine, *batch(1, 1, rank)))
    with pytest.raises(CheckpointError, match="cannot save between the last backward of a step and step"):
        engine.save_checkpoint(folder, "bad")
    engine.step()
    engine.save_checkpoint(folder, "good")
    assert (folder / "latest").read_text().split()[-1] == "good"
    engine.destroy()


def test_residuals_of_an_unfinished_step_are_not_saved(tmp_path: Path) -> None:
    run_ranks(2, _check_residuals, tmp_path)
