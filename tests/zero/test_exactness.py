"""Stages 0 to 3, unquantized, equal plain single-process training on the concatenated batch.

Through ZeroOptimizer on topologies that tests share, and through ``zero.initialize``, which makes its own.
"""

# covers zero/initialize.py

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.zero.models import as_vector, batch, groups_of, loss_of, new_model, relative_error, train_plain
from tests.zero.training import full_values, train, train_and_collect, zero_optimizer
from zero import initialize

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"model": {"is_tied": False}},
    "accumulation": {"num_micro": 3},
    "no_sync": {"num_micro": 3, "uses_no_sync": True},
    "accumulation steps": {"num_micro": 3, "settings": {"gradient_accumulation_steps": 3}},
    "clipping": {"max_norm": 0.5},
    "frozen and unused": {"model": {"has_frozen": True, "has_unused": True}},
    "everything": {
        "model": {"has_frozen": True, "has_unused": True},
        "num_micro": 2,
        "max_norm": 0.3,
        "settings": {"reduce_bucket_size": 1, "allgather_bucket_size": 3000, "overlap_comm": False},
    },
}


@cache
def _oracle(name: str, dtype: torch.dtype, world_size: int, steps: int) -> tuple[dict[str, Any], list[float]]:
    """Parameters and norms, computed once per rank for all stages."""
    case = CASES[name]
    model = new_model(dtype, **case.get("model", {}))
    loop = {key: case[key] for key in ("num_micro", "max_norm") if key in case}
    norms = train_plain(model, torch.optim.AdamW(groups_of(model), lr=1e-2), world_size=world_size, steps=steps, **loop)
    return dict(model.named_parameters()), norms


def _check_equals_single_process(
    rank: int, stage: int, name: str, dtype: torch.dtype, world_size: int, ranks_per_node: int
) -> None:
    case, steps = CASES[name], 20 if (name, world_size) == ("plain", 2) else 5
    expected, expected_norms = _oracle(name, dtype, world_size, steps)
    model = new_model(dtype, **case.get("model", {}))
    loop = {key: case[key] for key in ("num_micro", "max_norm", "uses_no_sync") if key in case}
    with zero_optimizer(model, stage=stage, ranks_per_node=ranks_per_node, **case.get("settings", {})) as optimizer:
        norms = train(model, optimizer, rank, steps=steps, **loop)
        got = full_values(model)
    _assert_equals(got, norms, expected, expected_norms, dtype)


def _assert_equals(
    got: dict[str, Any],
    norms: list[float],
    expected: dict[str, Any],
    expected_norms: list[float],
    dtype: torch.dtype = torch.float64,
) -> None:
    assert got.keys() == expected.keys()
    assert norms == pytest.approx(expected_norms, rel=1e-9 if dtype == torch.float64 else 1e-3)
    if dtype == torch.float64:
        for key, value in got.items():
            torch.testing.assert_close(
                value, expected[key].detach(), rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
            )
    else:
        assert relative_error(as_vector(got.values()), as_vector(expected.values())) < 1e-5


EVERYWHERE = ["plain", "accumulation", "frozen and unused", "everything"]
MATRIX = [
    *((name, torch.float64, 2, 2) for name in CASES),
    *((name, torch.float64, w, per_node) for name in EVERYWHERE for w, per_node in ((1, 1), (3, 3), (4, 2))),
    ("plain", torch.float32, 4, 2),  # test_differential.py has the options in float32 and 16 bit, with SGD
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "dtype", "world_size", "ranks_per_node"), MATRIX, ids=str)
def test_equals_single_process(stage: int, name: str, dtype: torch.dtype, world_size: int, ranks_per_node: int) -> None:
    run_ranks(world_size, _check_equals_single_process, stage, name, dtype, world_size, ranks_per_node)


def _check_engine(rank: int, stage: int, names: list[str], world_size: int, ranks_per_node: int) -> None:
    for name in names:
        case, steps = CASES[name], 5
        settings = dict(case.get("settings", {}))
        num_micro, max_norm = case.get("num_micro", 1), case.get("max_norm", 0.0)
        settings.pop("gradient_accumulation_steps", None)
        config = {
            "zero_optimization": {"stage": stage, **settings},
            "zcomm": {"ranks_per_node": ranks_per_node},
            "gradient_accumulation_steps": num_micro,
            "gradient_clipping": max_norm,
        }
        model = new_model(torch.float64, **case.get("model", {}))
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
        engine = initialize(model=model, optimizer=optimizer, config=config).engine
        norms = []
        for step in range(steps):
            for micro in range(num_micro):
                defers = case.get("uses_no_sync", False) and micro < num_micro - 1
                with engine.no_sync() if defers else nullcontext():
                    engine.backward(loss_of(engine, *batch(step, micro, rank)))
                engine.step()
            if max_norm:
                norms.append(engine.get_global_grad_norm())
        got = full_values(model)
        engine.destroy()
        _assert_equals(got, norms, *_oracle(name, torch.float64, world_size, steps))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 2), (4, 2)])
def test_the_engine_equals_single_process(stage: int, world_size: int, ranks_per_node: int) -> None:
    names = list(CASES) if world_size == 2 else ["everything"]
    run_ranks(world_size, _check_engine, stage, names, world_size, ranks_per_node)


def _check_stages_agree(rank: int, ranks_per_node: int, dtype: torch.dtype, case: dict[str, Any], close: bool) -> None:  # noqa: FBT001
    runs = {
        stage: train_and_collect(rank, stage=stage, ranks_per_node=ranks_per_node, dtype=dtype, steps=5, **case)
        for stage in (1, 2, 3)
    }
    for name, value in runs[2].items():
        assert torch.equal(value, runs[3][name]), name
        assert close or torch.equal(value, runs[1][name]), name
    assert relative_error(as_vector(runs[1].values()), as_vector(runs[2].values())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_stages_agree_bitwise_with_one_micro_batch(ranks_per_node: int, dtype: torch.dtype) -> None:
    case = {"loop": {"max_norm": 0.5}}
    run_ranks(4, _check_stages_agree, ranks_per_node, dtype, case, False)


def test_stages_2_and_3_agree_bitwise_with_accumulation() -> None:
    case = {"loop": {"num_micro": 3}, "gradient_accumulation_steps": 3}
    run_ranks(4, _check_stages_agree, 2, torch.float32, case, True)
