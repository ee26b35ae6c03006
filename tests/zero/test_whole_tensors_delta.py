"""Optimizers of whole tensors under ``mode="delta"`` and ``mode="delta_hpz"``: as AdamW under the same mode."""

# covers zero/_modes/delta.py zero/_modes/delta_hpz.py zero/_runtime/mode_state.py zero/_step/bucketwise_update.py

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import zcomm
import zero
from tests.ranks import run_ranks
from tests.zero.deltas import (
    check_agreement,
    check_an_overflow_changes_nothing,
    check_goes_on_elsewhere,
    check_goes_on_from_a_checkpoint,
    check_writes,
    masters_of,
    residuals_of,
)
from tests.zero.models import as_vector, batch, loss_of, new_model, relative_error
from tests.zero.test_delta_hpz import EXACT
from tests.zero.training import full_values, train, zero_optimizer
from tests.zero.whole_optimizers import (
    BUILDERS,
    check_sends_what_adamw_sends,
    matrices_and_others,
    steps_in_turn,
    train_plainly,
)
from zero._step import bucketwise_update
from zero._step.bucketwise_update import BucketwiseUpdate

HPZ: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "quantized"}
DELTAS: list[dict[str, Any]] = [{"stage": stage, "mode": "delta", "changes": "quantized"} for stage in (1, 2)]
PLACES = [(2, 1), (2, 2), (3, 1), (4, 2)]


def _unquantized(options: dict[str, Any]) -> dict[str, Any]:
    return options | (EXACT if options["mode"] == "delta_hpz" else {"weight_format": "none"})


PARTLY = {"has_frozen": True, "has_unused": True}


@cache
def _plainly(name: str, num_micro: int) -> Tensor:
    model, world_size = new_model(**PARTLY), torch.distributed.get_world_size()
    train_plainly(model, BUILDERS[name](model), world_size=world_size, steps=range(3), num_micro=num_micro)
    return as_vector(model.parameters())


def _with_muon(model: nn.Module, **options: Any) -> AbstractContextManager[zero.ZeroOptimizer]:
    return zero_optimizer(model, BUILDERS["muon"](model), **options)


def _check_exact(rank: int, per_node: int) -> None:
    names = ("muon", "lamb") if torch.distributed.get_world_size() == 4 else ("muon",)
    for name, num_micro, mode in itertools.product(names, (1, 2), (*DELTAS, HPZ)):
        model, build, clip = new_model(**PARTLY), BUILDERS[name], num_micro == 2 and mode is HPZ
        with zero_optimizer(
            model, build(model), ranks_per_node=per_node, gradient_accumulation_steps=num_micro, **_unquantized(mode)
        ) as optimizer:
            train(model, optimizer, rank, steps=3, num_micro=num_micro, uses_no_sync=clip)
            check_agreement(model, optimizer)
            got = full_values(model)
        expected = _plainly(name, num_micro)
        assert relative_error(as_vector(got.values()), expected) < 1e-5, (name, num_micro, mode)


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_without_quantization_it_is_one_process(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_exact, per_node)


def _torchs_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = matrices_and_others(model)
    return [Muon(matrices, lr=2e-3), AdamW(others, lr=1e-3)]


def _adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [AdamW(model.parameters(), lr=1e-3)]


def _check_quantized(rank: int, dtype: torch.dtype) -> None:
    """Parameters do not drift from the masters, with Muon as little as with AdamW; ranks hold the same bits."""
    for mode in (*DELTAS, HPZ):
        of_builds = []
        for build in (_torchs_muon, _adam):
            model, distances = new_model(dtype), []
            with zero_optimizer(
                model, build(model), ranks_per_node=2, gradient_accumulation_steps=2, **mode
            ) as optimizer:
                for _ in range(3):
                    train(model, optimizer, rank, steps=4, num_micro=2)
                    check_agreement(model, optimizer)
                    exact = as_vector(masters_of(model).values())
                    distances.append(relative_error(as_vector(full_values(model).values()), exact))
                if mode is HPZ:
                    assert residuals_of(optimizer).abs().sum() > 0
            of_builds.append(max(distances))
            assert max(distances) <= max(2 * distances[0], 0.003), (mode, distances)
        assert 0 < of_builds[0] < max(2 * of_builds[1], 0.003), (mode, of_builds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_stay_at_their_masters(dtype: torch.dtype) -> None:
    run_ranks(4, _check_quantized, dtype)


def _check_learns(rank: int) -> None:
    """With formats of few bits the loss ends where it ends without: on one batch, in 30 steps."""
    ends = []
    for mode in ({"stage": 2}, *DELTAS[1:], HPZ):
        model = new_model()
        with zero_optimizer(model, _torchs_muon(model), ranks_per_node=2, **mode) as optimizer:
            for _ in range(30):
                loss = loss_of(model, *batch(0, 0, rank))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            mean = zcomm.control.gather_float64(loss.detach().double().view(1), optimizer.topology).mean()
        ends.append(float(mean))
    assert all(abs(end - ends[0]) < 0.05 * ends[0] for end in ends), ends


def test_it_learns() -> None:
    run_ranks(4, _check_learns)


# Traffic.


def test_between_nodes_it_sends_what_adamw_sends() -> None:
    for mode in (*DELTAS, HPZ):
        run_ranks(4, check_sends_what_adamw_sends, Muon, mode, 2)


def _check_no_rank_waits(rank: int, folder: str, slow: int) -> None:
    """Rank ``slow`` begins its first update after all others have ended their last: none may need its change."""
    calls, step_in_turn = steps_in_turn(rank, folder, slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketwise_update, "RUN_NUMEL", 1)
        patch.setattr(BucketwiseUpdate, "_step", step_in_turn)
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, _torchs_muon(model), ranks_per_node=2, **HPZ) as optimizer:
            train(model, optimizer, rank, steps=1)
            check_agreement(model, optimizer)
    assert len(calls) > 2


@pytest.mark.parametrize("slow", [0, 3])
def test_no_rank_waits_for_anothers_update(slow: int, tmp_path: Path) -> None:
    run_ranks(4, _check_no_rank_waits, str(tmp_path), slow)


# Steps that are not applied, and writes outside of steps.


def _check_skipped(rank: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    for mode in (DELTAS[1], HPZ):
        model = new_model(torch.float32)
        with _with_muon(model, ranks_per_node=2, fp16=fp16, **mode) as optimizer:
            train(model, optimizer, rank, steps=2)
            check_an_overflow_changes_nothing(model, optimizer, rank)
            train(model, optimizer, rank, steps=1)
            assert optimizer.was_step_applied
            check_agreement(model, optimizer)


def test_skipped_steps_and_writes() -> None:
    run_ranks(4, _check_skipped)
    for mode in (DELTAS[0], HPZ):
        run_ranks(4, check_writes, partial(_with_muon, ranks_per_node=2, **mode))


# Checkpoints.


def _residual_sums(optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    """The sum of each parameter's residuals over all ranks, float64."""
    runtime, sums = optimizer.parts.runtime, dict[str, Tensor]()
    numels = {slot.name: slot.numel for bucket in runtime.buckets for slot in bucket.layout.slots}
    for residual in runtime.mode_state.residuals:
        layout, local_rank = residual.layout, residual.route.local_rank
        rows = layout.rows_in(residual.values(), local_rank)
        mine = {span.key: torch.zeros(numels[str(span.key)], dtype=torch.float64) for span in layout.spans}
        for piece in layout.pieces_of(local_rank):
            row = rows[piece.row]
            mine[piece.key][piece.offset : piece.offset + piece.numel] += row[piece.column : piece.column + piece.numel]
        total = zcomm.control.gather_float64(torch.cat(list(mine.values())), optimizer.topology).sum(0)
        parts = torch.split(total, [values.numel() for values in mine.values()])
        sums |= dict(zip(map(str, mine), parts, strict=True))
    return {name: sums[name] for name in sorted(sums)}


@pytest.mark.parametrize("mode", [DELTAS[1], HPZ], ids=["delta", "delta_hpz"])
def test_checkpoints_go_on_with_the_same_bits_and_elsewhere_with_the_sums(mode: dict[str, Any], tmp_path: Path) -> None:
    saving, loading = (partial(_with_muon, ranks_per_node=per_node) for per_node in (2, 1))
    run_ranks(4, check_goes_on_from_a_checkpoint, str(tmp_path), partial(saving, **mode), _residual_sums)
    others = [{"stage": 2}, HPZ if mode != HPZ else DELTAS[0]]
    for world_size in (4, 2, 3):
        run_ranks(world_size, check_goes_on_elsewhere, str(tmp_path), loading, mode, others, _residual_sums)
