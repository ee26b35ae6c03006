"""``changes="exact"``: whatever happens, what forward reads are the masters, rounded once, on every rank."""

# covers zero/_modes/deltas.py zero/_runtime/validate.py zero/_runtime/mode_state.py zero/_config/setting_keys.py

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.zcomm.test_capped_changes import capped
from tests.zero.deltas import check_an_overflow_changes_nothing
from tests.zero.models import batch, groups_of, loss_of, new_model, relative_error
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from tests.zero.whole_optimizers import matrices_and_others
from zcomm import ConfigError, LayoutError
from zcomm._kernels import ulps
from zero import ZeroOptimizer
from zero._checkpoint.index import read_index
from zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

HPZ: dict[str, Any] = {"stage": 3, "mode": "delta_hpz"}
DELTAS: list[dict[str, Any]] = [{"stage": stage, "mode": "delta"} for stage in (1, 2)]
MODES = [*DELTAS, HPZ]
EXACT: dict[str, Any] = {"changes": "exact"}
QUANTIZED: dict[str, Any] = {"changes": "quantized"}


def _check(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Every rank has the same parameters: the rounded masters."""
    values, names = full_values(model), {param: name for name, param in model.named_parameters()}
    numel = 0
    for param, first, master in optimizer.master_pieces():
        value = values[names[param]].flatten()[first : first + master.numel()]
        assert torch.equal(value, master.flatten().to(param.dtype)), names[param]
        numel += master.numel()
    facts = torch.cat([value.flatten().double() for value in values.values()] + [torch.tensor([float(numel)])])
    of_ranks = zcomm.control.gather_float64(facts, optimizer.topology)
    assert (of_ranks[:, :-1] == of_ranks[0, :-1]).all(), "ranks differ"
    assert of_ranks[:, -1].sum() == sum(param.numel() for param in model.parameters() if param.requires_grad)


def _adam(model: nn.Module) -> Any:
    return AdamW(groups_of(model), lr=1e-2)


def _muon(model: nn.Module) -> Any:
    matrices, others = matrices_and_others(model)
    return [Muon(matrices, lr=2e-3), AdamW(others, lr=1e-3)]


def _check_steps(rank: int, per_node: int) -> None:
    for mode in MODES:
        for build, dtype in ((_adam, torch.bfloat16), (_muon, torch.bfloat16), (_adam, torch.float16)):
            model = new_model(dtype, has_frozen=True, has_unused=True)
            with zero_optimizer(
                model, build(model), ranks_per_node=per_node, gradient_accumulation_steps=2, **mode, **EXACT
            ) as optimizer:
                assert optimizer.effective.sends_exact_changes
                for _ in range(3):
                    train(model, optimizer, rank, steps=1, num_micro=2, max_norm=0.5, uses_no_sync=True)
                    _check(model, optimizer)


@pytest.mark.parametrize(("world_size", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_after_each_step_forward_reads_the_rounded_masters(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_steps, per_node)


def _check_default(rank: int) -> None:
    def is_exact(model: nn.Module, per_node: int = 2, **options: Any) -> bool:
        with zero_optimizer(model, AdamW(model.parameters(), lr=1e-3), ranks_per_node=per_node, **options) as optimizer:
            train(model, optimizer, rank, steps=1)
            found = optimizer.effective.sends_exact_changes
            if found:
                _check(model, optimizer)
            elif model.wte.weight.dtype == torch.float32 and per_node == 2:
                assert "changes auto: quantized, as 'position' is torch.float32 on cpu" in str(optimizer.effective)
            return found

    for mode in MODES:
        assert is_exact(new_model(torch.bfloat16), **mode)
        assert is_exact(new_model(torch.float16), **mode)
        assert not is_exact(new_model(torch.bfloat16), **QUANTIZED, **mode)
        assert not is_exact(new_model(torch.bfloat16), weight_format="int8", **mode)
        assert not is_exact(new_model(torch.float32), **mode)
        assert not is_exact(new_model(torch.bfloat16), 4, **mode)  # one node
        with patch.object(ulps, "is_compiled", return_value=False):  # kernels decide the time, not the bits
            assert is_exact(new_model(torch.bfloat16), **mode)
        model = new_model(torch.bfloat16)
        frozen = model.norm.weight
        frozen.requires_grad_(False)
        frozen.data = frozen.data.float()
        with zero_optimizer(model, AdamW(groups_of(model), lr=1e-3), ranks_per_node=2, **mode) as optimizer:
            assert optimizer.effective.sends_exact_changes
            _check(model, optimizer)


def test_it_is_the_default_for_16_bit_parameters_in_host_memory() -> None:
    run_ranks(4, _check_default)


def _check_capped(rank: int) -> None:
    """As on GPUs, where both sides know the size of a message: those of a larger rate do not fit at once."""
    with capped():
        _check_steps(rank, 2)
        for mode in (DELTAS[1], HPZ):
            model = new_model(torch.bfloat16)
            with zero_optimizer(
                model, AdamW(model.parameters(), lr=1e-5), ranks_per_node=2, **mode, **EXACT
            ) as optimizer:
                for rate in (1e-5, 1e-5, 1e-2, 1e-5, 1e-5):
                    optimizer.param_groups[0]["lr"] = rate
                    train(model, optimizer, rank, steps=1)
                    _check(model, optimizer)


def test_with_buffers_of_a_known_size_too() -> None:
    run_ranks(4, _check_capped)


def _check_early_steps(rank: int, cls: type[torch.optim.Optimizer]) -> None:
    """Two steps at once, as with gradients that a user sets, while changes are late."""
    decode = ulps.decode

    def late(message: Tensor, values: Tensor) -> None:
        time.sleep(0.3)
        decode(message, values)

    torch.manual_seed(0)
    model = nn.Linear(256, 256).bfloat16()
    built = zero_optimizer(model, cls(model.parameters(), lr=0.1), ranks_per_node=2, **HPZ, **EXACT)
    with built as optimizer, patch.object(ulps, "decode", late):
        model(torch.randn(8, 256).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.step()
        _check(model, optimizer)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adafactor])  # changes are sent early; after all updates
def test_a_step_before_the_last_change_has_arrived(cls: type[torch.optim.Optimizer]) -> None:
    run_ranks(4, _check_early_steps, cls)


# Nothing is lost: the bits of plain training.


def _values_after(
    rank: int, steps: int, check: Callable[..., None] | None = None, *, num_micro: int = 1, **options: Any
) -> dict[str, Tensor]:
    model = new_model(torch.bfloat16, has_unused=True)
    with zero_optimizer(model, ranks_per_node=2, gradient_accumulation_steps=num_micro, **options) as optimizer:
        for step in range(steps):
            for micro in range(num_micro):
                optimizer.scale(loss_of(model, *batch(step, micro, rank)) / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            if check is not None:
                check(model, optimizer)
        masters = torch.cat([master.flatten() for _, _, master in optimizer.master_pieces()])
        return full_values(model) | {"masters": masters}


def _check_plain_bits(rank: int, mode: dict[str, Any], steps: int) -> None:
    gradients = {"gradient_format": ("none", "none")} if mode == HPZ else {}
    exact = _values_after(rank, steps, _check, **gradients, **mode, **EXACT)
    assert_same_bits(exact, _values_after(rank, steps, stage=mode["stage"], **gradients))


@pytest.mark.parametrize("mode", MODES, ids=["delta at stage 1", "delta at stage 2", "delta_hpz"])
def test_with_unquantized_gradients_it_has_the_bits_of_plain_training(mode: dict[str, Any]) -> None:
    run_ranks(4, _check_plain_bits, mode, 6)


def _check_accumulation(rank: int) -> None:
    """delta_hpz adds the batches inside the node first: other roundings than plain training's, in float32."""
    gradients = {"gradient_format": ("none", "none")}
    exact = _values_after(rank, 20, num_micro=2, **gradients, **HPZ, **EXACT)
    plain = _values_after(rank, 20, num_micro=2, stage=3, **gradients)
    assert relative_error(exact["masters"], plain["masters"]) < 1e-6


def test_with_accumulation_masters_are_those_of_plain_training_but_for_rounding() -> None:
    run_ranks(4, _check_accumulation)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES, ids=["delta at stage 1", "delta at stage 2", "delta_hpz"])
def test_after_two_thousand_steps_too(mode: dict[str, Any]) -> None:
    """It takes longer than ranks may by default: set ZCOMM_TEST_TIMEOUT_S=1500, and pytest's --timeout."""
    run_ranks(4, _check_plain_bits, mode, 2000)


# Everything else that changes masters.


def _check_writes(rank: int) -> None:
    for mode in (DELTAS[0], HPZ):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, ranks_per_node=2, **mode, **EXACT) as optimizer:
            train(model, optimizer, rank, steps=2)
            with zero.GatheredParameters(list(model.parameters()), modifier_rank=1), torch.no_grad():
                model.blocks[0].mlp[0].weight.mul_(1.7)
            _check(model, optimizer)
            param = model.blocks[0].mlp[0].weight
            master = safe_get_full_fp32_param(param)
            assert master is not None
            safe_set_full_fp32_param(param, master * 1.001)
            _check(model, optimizer)
            train(model, optimizer, rank, steps=2)
            _check(model, optimizer)
            before = full_values(model)
            average = zero.MovingAverage(optimizer, 0.9)
            train(model, optimizer, rank, steps=1)
            average.update()
            trained = full_values(model)
            with average.applied():
                _check(model, optimizer)
            assert_same_bits(full_values(model), trained)
            assert any(not torch.equal(before[name], trained[name]) for name in before)


def check_an_overflow(
    rank: int, everything: Callable[[nn.Module, ZeroOptimizer], dict[str, Tensor]], **mode: Any
) -> None:
    """A step between others is skipped: ``everything`` stays, and replicas are exact afterwards."""
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    model = new_model(torch.float32)
    with zero_optimizer(model, ranks_per_node=2, fp16=fp16, **mode, **EXACT) as optimizer:
        train(model, optimizer, rank, steps=2)
        check_an_overflow_changes_nothing(model, optimizer, rank, everything)
        train(model, optimizer, rank, steps=1)
        _check(model, optimizer)


def _check_overflow(rank: int) -> None:
    for mode in (DELTAS[1], HPZ):
        check_an_overflow(rank, lambda model, _: full_values(model), **mode)


def test_writes_averages_and_skipped_steps() -> None:
    run_ranks(4, _check_writes)
    run_ranks(4, _check_overflow)


def _check_offload(rank: int, folder: str) -> None:
    def values(**options: Any) -> dict[str, Tensor]:
        model = new_model(torch.bfloat16, has_unused=True)
        inner = zero.CPUAdam(groups_of(model), lr=1e-2)
        with zero_optimizer(model, inner, ranks_per_node=2, **HPZ, **EXACT, **options) as optimizer:
            for _ in range(3):
                train(model, optimizer, rank, steps=1)
                _check(model, optimizer)
            return full_values(model)

    host = values(offload_optimizer={"device": "cpu"})
    assert_same_bits(values(offload_optimizer={"device": "nvme", "nvme_path": folder}), host)


def test_offloaded_states(tmp_path: Path) -> None:
    run_ranks(4, _check_offload, str(tmp_path))


def _check_resumed(rank: int, folder: str, mode: dict[str, Any]) -> None:
    """Checkpoints of exact and of quantized changes are loaded by both; exact ones are then exact at once.

    Replicas that are the rounded masters take no room in a checkpoint.
    """
    for saves in (EXACT, QUANTIZED):
        tag = saves["changes"]
        model = new_model(torch.bfloat16, has_frozen=True)
        with zero_optimizer(model, ranks_per_node=2, **mode, **saves) as optimizer:
            train(model, optimizer, rank, steps=3)
            zero.save_checkpoint(optimizer, folder, tag)
            state = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, rank, steps=2)
            expected = full_values(model)
            optimizer.load_state_dict(state)
            train(model, optimizer, rank, steps=2)
            assert_same_bits(full_values(model), expected)
        keys = read_index(Path(folder) / tag).tensors
        assert any(key.startswith("replica/") for key in keys) is (saves == QUANTIZED)
        for loads in (EXACT, QUANTIZED):
            again = new_model(torch.bfloat16, has_frozen=True, seed=5)
            with zero_optimizer(again, ranks_per_node=2, **mode, **loads) as optimizer:
                zero.load_checkpoint(optimizer, folder, tag)
                if loads == EXACT:
                    _check(again, optimizer)
                train(again, optimizer, rank, steps=2)
                if loads == saves:
                    assert_same_bits(full_values(again), expected)
                if loads == EXACT:
                    _check(again, optimizer)


@pytest.mark.parametrize("mode", [DELTAS[0], HPZ], ids=["delta", "delta_hpz"])
def test_checkpoints(mode: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(4, _check_resumed, str(tmp_path), mode)


# Bytes.


def _check_bytes(rank: int) -> None:
    """At a low learning rate it sends less than in 4 bits; no gradient formats differ."""
    found = {}
    for changes in ("quantized", "exact"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
        inner = AdamW(model.parameters(), lr=1e-5)
        with zero_optimizer(model, inner, ranks_per_node=2, **HPZ, changes=changes) as optimizer:
            for step in range(6):
                if step == 3:
                    counts = zcomm.traffic()
                    counts.__enter__()
                x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step + 10 * rank)).bfloat16()
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            full_values(model)
            counts.__exit__(None, None, None)
        found[changes] = counts.bytes(link="inter", operation="delta_gather")
    assert 0 < found["exact"] < 0.5 * found["quantized"], found


def test_at_low_learning_rates_it_sends_less() -> None:
    run_ranks(4, _check_bytes)


# Bad input.


def _check_refused(rank: int) -> None:
    for options in (HPZ, DELTAS[0]):
        with pytest.raises(LayoutError, match=r"changes='exact' serves bfloat16 .* is torch\.float32"):
            ZeroOptimizer(new_model(), AdamW, topology=topology(1), **options, **EXACT)
        for per_node in (1, 2):  # also where a mode has no effect: a script is tried on one node first
            with pytest.raises(ConfigError, match=r"changes='exact' .* weight_format='int4'"):
                ZeroOptimizer(
                    new_model(torch.bfloat16),
                    AdamW,
                    topology=topology(per_node),
                    weight_format="int4",
                    **options,
                    **EXACT,
                )
    with pytest.raises(ConfigError, match="changes"):
        ZeroOptimizer(new_model(), AdamW, topology=topology(1), changes="lossless", **HPZ)
    with zero_optimizer(new_model(torch.bfloat16), stage=3, ranks_per_node=1, **EXACT) as optimizer:
        assert "inactive: changes='exact' (without a mode" in str(optimizer.effective)
    with zero_optimizer(new_model(torch.bfloat16), ranks_per_node=2, **HPZ, **EXACT) as optimizer:
        assert "inactive: mode='delta_hpz' (one node" in str(optimizer.effective)


def test_what_is_refused() -> None:
    run_ranks(2, _check_refused)
