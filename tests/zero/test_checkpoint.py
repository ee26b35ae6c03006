"""Checkpoints load from any stage and world size into any other, bit for bit; training continues as before."""

# covers zero/_checkpoint/collective_save.py zero/_checkpoint/flat_parts.py

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import train, zero_optimizer

STAGES, WORLD_SIZES = (1, 2, 3), (1, 2, 3, 4)


def whole_state(optimizer: zero.ZeroOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """The oracle: masters and optimizer states of every parameter, assembled with torch's own collectives."""
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
def test_any_stage_loads_any_other(checkpoints: Any, world_size: int) -> None:
    folder = checkpoints(world_size)
    run_ranks(world_size, _load_at_stages, str(folder), [(stage, world_size) for stage in STAGES])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_stage_and_world_size_loads_any_other(checkpoints: Any, world_size: int) -> None:
    """Together with the test above: all 144 pairs of (stage, world size)."""
    others = [saved_world for saved_world in WORLD_SIZES if saved_world != world_size]
    for saved_world in others:
        folder = checkpoints(saved_world)
    run_ranks(world_size, _load_at_stages, str(folder), [(s, w) for s in STAGES for w in others])


class Dropped(nn.Module):
    """Its forward draws random numbers and keeps a running buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = new_model()
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen += targets.float().mean() * random.random()
        hidden = self.inner.wte(tokens).float().detach() * np.random.rand()
        noise = self.dropout(torch.ones(tokens.shape[-1])).mean() + hidden.mean() * 1e-3
        return loss_of(self.inner, tokens, targets) * noise


SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


def _engine(stage: int, schedule: str) -> Any:
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
        "scheduler": {"type": schedule, "params": SCHEDULES[schedule]},
        "steps_per_print": 1000,
    }
    engine, *_ = zero.initialize(model=Dropped(), optimizer=torch.optim.AdamW, config=config)
    return engine


def _advance(engine: Any, rank: int, steps: range) -> list[Any]:
    seen = []
    for step in steps:
        for micro in range(2):
            loss = engine(*batch(step, micro, rank))
            engine.backward(loss * (float("inf") if step == 1 and rank == 1 else 1.0))
            engine.step()
        seen.append((loss.item(), engine.get_lr(), engine.cur_scale, engine.global_steps, engine.skipped_steps))
    return seen


def _check_resumes(rank: int, folder: str, stage: int, schedule: str, is_async: bool) -> None:  # noqa: FBT001
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    straight = _engine(stage, schedule)
    _advance(straight, rank, range(3))
    saving = straight.save_checkpoint(folder, client_state={"epoch": 7}, async_op=is_async)
    expected = _advance(straight, rank, range(3, 7))
    assert saving
    assert saving.wait() == Path(folder) / "global_step3"
    states = whole_state(straight.optimizer, straight.module), straight.module.seen.clone()
    straight.destroy()
    torch.manual_seed(99 + rank)
    resumed = _engine(stage, schedule)
    _advance(resumed, rank, range(10, 11))
    assert resumed.load_checkpoint(folder) == (Path(folder) / "global_step3", {"epoch": 7})
    assert (resumed.global_steps, resumed.skipped_steps, resumed.micro_steps) == (3, 1, 6)
    assert _advance(resumed, rank, range(3, 7)) == expected
    assert_equal_bits(whole_state(resumed.optimizer, resumed.module), states[0])
    assert torch.equal(resumed.module.seen, states[1])
    resumed.destroy()


@pytest.mark.parametrize(
    ("stage", "schedule", "is_async"),
    [
        (0, "WarmupLR", False),
        (1, "WarmupDecayLR", True),
        (2, "WarmupCosineLR", False),
        (3, "OneCycle", True),
        (3, "LRRangeTest", False),
    ],
)
def test_resuming_has_the_same_bits_as_not_stopping(
    tmp_path: Path,
    stage: int,
    schedule: str,
    is_async: bool,  # noqa: FBT001
) -> None:
    run_ranks(2, _check_resumes, str(tmp_path), stage, schedule, is_async)


def _check_weights_alone(rank: int, folder: str, stage: int) -> None:
    """Counters, schedule, moments and random numbers stay as they are; the weights are those of the save."""
    saved = _engine(stage, "WarmupLR")
    _advance(saved, rank, range(3))
    saved.save_checkpoint(folder, client_state={"epoch": 7})
    state = saved.module.state_dict()  # at stage 3 the first rank has it; each rank has a buffer of its own
    saved.save_16bit_model(folder, "model.safetensors")
    saved.destroy()
    for source, client_state in ((folder, {"epoch": 7}), (f"{folder}/model.safetensors", {})):
        other = _engine(stage, "WarmupLR")
        _advance(other, rank, range(10, 11))
        before = other.get_lr(), other.lr_scheduler.state_dict(), torch.get_rng_state()
        loaded = other.load_checkpoint(source, load_module_only=True)
        assert loaded.client_state == client_state
        assert (other.global_steps, other.micro_steps) == (1, 2)
        assert (other.get_lr(), other.lr_scheduler.state_dict()) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])
        for name, value in other.module.state_dict().items():
            assert name == "seen" or torch.equal(value, state[name]), name
        _advance(other, rank, range(3, 4))
        other.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_loads_weights_alone(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _check_weights_alone, str(tmp_path), stage)
