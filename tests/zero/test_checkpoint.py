"""Checkpoints: any stage and world size to any other, no bit changed; training goes on as if it had never stopped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.training import train, zero_optimizer

STAGES, WORLD_SIZES = (1, 2, 3), (1, 2, 3, 4)


def whole_state(optimizer: zero.ZeroOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Masters and optimizer states of every parameter, put together with torch's own collectives: the oracle."""
    names = {param: name for name, param in model.named_parameters()}
    mine: list[tuple[str, str, int, Tensor]] = []
    for param, first, values in optimizer.master_pieces():
        name = names[param]
        mine.append((name, "master", first, values.detach().clone()))
        leaf = next(p for group in optimizer.param_groups for p in group["params"] if p.data_ptr() == values.data_ptr())
        for key, value in optimizer.state[leaf].items():
            kept = value[: values.numel()] if value.dim() else value.reshape(1)
            mine.append((name, key, first if value.dim() else 0, kept.clone()))
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, mine)
    whole: dict[str, Tensor] = {}
    for name, key, first, values in (piece for pieces in of_ranks for piece in pieces):
        numel = 1 if key == "step" else model.get_parameter(name).numel()
        into = whole.setdefault(f"{key} {name}", torch.full((numel,), float("nan"), dtype=values.dtype))
        into[first : first + values.numel()] = values
    return whole


def assert_equal_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    wrong = [key for key in got if not torch.equal(got[key], expected[key])]
    assert not wrong, wrong[:5]
    assert not any(value.isnan().any() for value in got.values())


def _save_at_stages(rank: int, folder: str, world_size: int) -> None:
    for stage in STAGES:
        model = new_model(torch.bfloat16, has_frozen=True)
        with zero_optimizer(model, stage=stage) as optimizer:
            train(model, optimizer, rank, steps=2)
            zero.save_checkpoint(optimizer, folder, f"stage{stage}-world{world_size}", client_state={"step": 2})
            state = whole_state(optimizer, model)
            if rank == 0:
                torch.save(state, Path(folder) / f"stage{stage}-world{world_size}.pt")


def _load_at_stages(rank: int, folder: str, saved: list[tuple[int, int]]) -> None:
    for stage in STAGES:
        model = new_model(torch.bfloat16, seed=1, has_frozen=True)
        with zero_optimizer(model, stage=stage) as optimizer:
            for saved_stage, saved_world in saved:
                tag = f"stage{saved_stage}-world{saved_world}"
                loaded = zero.load_checkpoint(optimizer, folder, tag)
                assert loaded == (Path(folder) / tag, {"step": 2})
                expected = torch.load(Path(folder) / f"{tag}.pt", weights_only=True)
                assert_equal_bits(whole_state(optimizer, model), expected)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def saved_by(world_size: int) -> Path:
        run_ranks(world_size, _save_at_stages, str(folder), world_size)
        return folder

    return saved_by


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_stage_and_world_size_loads_any_other(checkpoints: Any, world_size: int) -> None:
    """All 144 pairs of (stage, world size)."""
    for saved_world in WORLD_SIZES:
        folder = checkpoints(saved_world)
    run_ranks(world_size, _load_at_stages, str(folder), [(s, w) for s in STAGES for w in WORLD_SIZES])
