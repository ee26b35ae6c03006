"""Optimizers of whole tensors under ``mode="delta"`` and ``mode="delta_hpz"``: as AdamW under the same mode."""

# covers zero/_modes/delta.py zero/_modes/delta_hpz.py zero/_runtime/mode_state.py zero/_step/bucketwise_update.py

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.zero.models import as_vector, batch, loss_of, new_model, relative_error
from tests.zero.test_delta import check_an_overflow_changes_nothing, check_ranks_agree
from tests.zero.test_delta_hpz import EXACT, replicas_of, residuals_of
from tests.zero.test_delta_hpz_state import check_goes_on_from_a_checkpoint
from tests.zero.test_delta_hpz_state import everything_of as everything_of_hpz
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from tests.zero.whole_optimizers import BUILDERS, matrices_and_others, steps_in_turn, train_plainly
from zero._step import bucketwise_update
from zero._step.bucketwise_update import BucketwiseUpdate
from zero.utils import safe_get_full_fp32_param

HPZ: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "quantized"}
DELTAS: list[dict[str, Any]] = [{"stage": stage, "mode": "delta", "changes": "quantized"} for stage in (1, 2)]
PLACES = [(2, 1), (2, 2), (3, 1), (4, 2)]


def _check_ranks(optimizer: zero.ZeroOptimizer, model: nn.Module) -> None:
    """All ranks hold the same bits."""
    got = as_vector(full_values(model).values())
    of_ranks = zcomm.control.gather_float64(got, optimizer.topology)
    assert (of_ranks == of_ranks[0]).all(), "ranks differ"
    if optimizer.effective.mode == "delta_hpz":
        mine, t = replicas_of(optimizer).double(), optimizer.topology
        numels = zcomm.control.gather_float64(torch.tensor([float(mine.numel())]), t)
        padded = torch.nn.functional.pad(mine, (0, int(numels.max()) - mine.numel()))
        of_nodes = zcomm.control.gather_float64(padded, t).view(t.num_nodes, -1)
        assert (of_nodes == of_nodes[0]).all(), "replicas differ between nodes"
    elif optimizer.effective.mode == "delta":
        check_ranks_agree(optimizer)


def _unquantized(options: dict[str, Any]) -> dict[str, Any]:
    return options | (EXACT if options["mode"] == "delta_hpz" else {"weight_format": "none"})


PARTLY = {"has_frozen": True, "has_unused": True}


@cache
def _plainly(name: str, num_micro: int) -> Tensor:
    model, world_size = new_model(**PARTLY), torch.distributed.get_world_size()
    train_plainly(model, BUILDERS[name](model), world_size=world_size, steps=range(3), num_micro=num_micro)
    return as_vector(model.parameters())


def _check_exact(rank: int, per_node: int) -> None:
    names = ("muon", "lamb") if torch.distributed.get_world_size() == 4 else ("muon",)
    for name, num_micro, mode in itertools.product(names, (1, 2), (*DELTAS, HPZ)):
        model, build, clip = new_model(**PARTLY), BUILDERS[name], num_micro == 2 and mode is HPZ
        with zero_optimizer(
            model, build(model), ranks_per_node=per_node, gradient_accumulation_steps=num_micro, **_unquantized(mode)
        ) as optimizer:
            train(model, optimizer, rank, steps=3, num_micro=num_micro, uses_no_sync=clip)
            _check_ranks(optimizer, model)
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
                    _check_ranks(optimizer, model)
                    masters = [safe_get_full_fp32_param(param) for param in model.parameters()]
                    exact = as_vector([master for master in masters if master is not None])
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


def _sent(rank: int, build: Any, mode: dict[str, Any]) -> float:
    """Bytes between nodes of all ranks in two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)) for _ in range(4)])
    with zero_optimizer(model, build(model), ranks_per_node=2, gradient_accumulation_steps=2, **mode) as optimizer:
        with zcomm.traffic() as counts:
            for step in range(4):
                x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step + 10 * rank))
                model(x).square().mean().backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            full_values(model)
        own = torch.tensor([float(counts.bytes(link="inter"))], dtype=torch.float64)
        return float(zcomm.control.gather_float64(own, topology(2)).sum())


def _muon_of_matrices(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    return [Muon([p for p in params if p.ndim == 2]), AdamW([p for p in params if p.ndim != 2])]


def _check_traffic(rank: int) -> None:
    for mode in (*DELTAS, HPZ):
        muon, adam = (_sent(rank, build, mode) for build in (_muon_of_matrices, _adam))
        assert muon <= 1.02 * adam, (mode, muon, adam)


def test_between_nodes_it_sends_what_adamw_sends() -> None:
    run_ranks(4, _check_traffic)


def _check_no_rank_waits(rank: int, folder: str, slow: int) -> None:
    """Rank ``slow`` begins its first update after all others have ended their last: none may need its change."""
    calls, step_in_turn = steps_in_turn(rank, folder, slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketwise_update, "RUN_NUMEL", 1)
        patch.setattr(BucketwiseUpdate, "_step", step_in_turn)
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, _torchs_muon(model), ranks_per_node=2, **HPZ) as optimizer:
            train(model, optimizer, rank, steps=1)
            _check_ranks(optimizer, model)
    assert len(calls) > 2


@pytest.mark.parametrize("slow", [0, 3])
def test_no_rank_waits_for_anothers_update(slow: int, tmp_path: Path) -> None:
    run_ranks(4, _check_no_rank_waits, str(tmp_path), slow)


# Steps that are not applied, and writes outside of steps.


def _check_skipped(rank: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    for mode in (DELTAS[1], HPZ):
        model = new_model(torch.float32)
        with zero_optimizer(model, BUILDERS["muon"](model), ranks_per_node=2, fp16=fp16, **mode) as optimizer:
            train(model, optimizer, rank, steps=2)
            check_an_overflow_changes_nothing(model, optimizer, rank, _everything)
            train(model, optimizer, rank, steps=1)
            assert optimizer.was_step_applied
            _check_ranks(optimizer, model)


def _check_writes(rank: int) -> None:
    for mode in (DELTAS[0], HPZ):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, BUILDERS["muon"](model), ranks_per_node=2, **mode) as optimizer:
            train(model, optimizer, rank, steps=2)
            with zero.GatheredParameters(list(model.parameters()), modifier_rank=1), torch.no_grad():
                model.blocks[0].mlp[0].weight.mul_(1.7)
            for (name, value), param in zip(full_values(model).items(), model.parameters(), strict=True):
                master = safe_get_full_fp32_param(param)
                assert master is not None
                assert torch.equal(value, master.to(param.dtype)), name
            train(model, optimizer, rank, steps=1)
            _check_ranks(optimizer, model)


def test_skipped_steps_and_writes() -> None:
    run_ranks(4, _check_skipped)
    run_ranks(4, _check_writes)


# Checkpoints.


def _everything(model: nn.Module, optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    if optimizer.effective.mode == "delta_hpz":
        return everything_of_hpz(model, optimizer)
    masters = torch.cat([torch.empty(0), *(values.flatten() for _, _, values in optimizer.master_pieces())])
    return full_values(model) | {"masters": masters}


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


def _save(rank: int, folder: str, mode: dict[str, Any]) -> None:
    def optimizer_for(model: nn.Module) -> AbstractContextManager[zero.ZeroOptimizer]:
        return zero_optimizer(model, BUILDERS["muon"](model), ranks_per_node=2, **mode)

    check_goes_on_from_a_checkpoint(rank, folder, optimizer_for, _everything, _residual_sums)


def _load_elsewhere(rank: int, folder: str, per_node: int, mode: dict[str, Any]) -> None:
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    model = new_model(torch.bfloat16, has_frozen=True, seed=5)
    with zero_optimizer(model, BUILDERS["muon"](model), ranks_per_node=per_node, **mode) as optimizer:
        zero.load_checkpoint(optimizer, folder)
        assert_same_bits(full_values(model), expected["values"])
        if mode == HPZ:
            got = _residual_sums(optimizer)
            assert as_vector(got.values()).norm() > 0
            assert relative_error(as_vector(got.values()), as_vector(expected["sums"][name] for name in got)) < 0.02
        _check_ranks(optimizer, model)
        train(model, optimizer, rank, steps=1)
        _check_ranks(optimizer, model)
    for others in ({"stage": 2}, HPZ if mode != HPZ else DELTAS[0]):  # and where there is another mode, or none
        other = new_model(torch.bfloat16, has_frozen=True, seed=5)
        with zero_optimizer(other, BUILDERS["muon"](other), ranks_per_node=per_node, **others) as optimizer:
            zero.load_checkpoint(optimizer, folder)
            train(other, optimizer, rank, steps=1)
            _check_ranks(optimizer, other)


@pytest.mark.parametrize("mode", [DELTAS[1], HPZ], ids=["delta", "delta_hpz"])
def test_checkpoints_go_on_with_the_same_bits_and_elsewhere_with_the_sums(mode: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path), mode)
    run_ranks(4, _load_elsewhere, str(tmp_path), 1, mode)
    run_ranks(2, _load_elsewhere, str(tmp_path), 1, mode)
    run_ranks(3, _load_elsewhere, str(tmp_path), 1, mode)
