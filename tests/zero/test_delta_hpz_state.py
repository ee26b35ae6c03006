"""``mode="delta_hpz"``: its state between steps, in checkpoints, on other topologies, and with offload."""

# covers zero/_runtime/mode_state.py zero/_runtime/runtime.py

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from tests.ranks import run_ranks
from tests.zero.deltas import check_goes_on_elsewhere, check_goes_on_from_a_checkpoint, check_offload, everything_of
from tests.zero.models import batch, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import control

MODE: dict[str, Any] = {"stage": 3, "mode": "delta_hpz", "changes": "quantized"}


def _residual_sums(optimizer: zero.ZeroOptimizer) -> dict[str, Tensor]:
    """The sum of each parameter's residuals over all ranks, float64."""
    runtime, t, sums = optimizer.parts.runtime, optimizer.topology, dict[str, Tensor]()
    for grads, residual in zip(runtime.reducer.all, runtime.reducer.reduction.residuals, strict=True):
        whole = torch.zeros(t.world_size, grads.bucket.layout.shard_numel)
        first = t.local_rank * t.num_nodes
        whole[first : first + t.num_nodes] = residual.values()
        total = control.gather_float64(whole.flatten(), t).sum(0)
        for slot in grads.bucket.layout.slots:
            sums[slot.name] = total[slot.offset : slot.offset + slot.numel]
    return sums


def test_checkpoints_go_on_with_the_same_bits_and_elsewhere_with_the_sums(tmp_path: Path) -> None:
    saving, loading = (partial(zero_optimizer, ranks_per_node=per_node) for per_node in (2, 1))
    run_ranks(4, check_goes_on_from_a_checkpoint, str(tmp_path), partial(saving, **MODE), _residual_sums)
    for world_size in (4, 2):
        run_ranks(world_size, check_goes_on_elsewhere, str(tmp_path), loading, MODE, [{"stage": 2}], _residual_sums)


def test_offloaded_states(tmp_path: Path) -> None:
    run_ranks(4, check_offload, str(tmp_path), partial(zero_optimizer, ranks_per_node=2, **MODE), 2)


def _check_memory(rank: int) -> None:
    """Bytes per parameter: 2 / L replica, 1 / L residual, and 4 / L node sums with accumulation."""
    for num_micro in (1, 2):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, ranks_per_node=2, gradient_accumulation_steps=num_micro, **MODE) as optimizer:
            train(model, optimizer, rank, steps=2, num_micro=num_micro)
            numel = sum(bucket.layout.numel for bucket in optimizer.parts.runtime.buckets)
            buffers = optimizer.memory().buffers
            assert buffers["secondary partition"] == numel
            assert numel / 2 <= buffers["residuals"] <= numel / 2 * 1.01
            assert buffers["sums of the node"] == (2 * numel if num_micro > 1 else 0)


def _check_grad_scaler(rank: int, num_micro: int) -> None:
    """Scales are powers of two, so they change no bit unless scaled and unscaled values are mixed up."""
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)):
        model = new_model()
        with zero_optimizer(model, **MODE, ranks_per_node=1, gradient_accumulation_steps=num_micro) as optimizer:
            for step in range(9):
                overflows = step in (3, 6)
                if overflows and scaler is None:
                    continue
                for micro in range(num_micro):
                    loss = loss_of(model, *batch(step, micro, rank)) * (math.inf if overflows and rank else 1)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
            ends.append(everything_of(model, optimizer))
        assert scaler is None or scaler.get_scale() == 2.0**11, "it has grown three times and fallen twice"
    assert ends[0]["residuals"].any()
    assert_same_bits(*ends)


@pytest.mark.parametrize("num_micro", [1, 2])
def test_under_torchs_grad_scaler_bits_are_those_without(num_micro: int) -> None:
    run_ranks(2, _check_grad_scaler, num_micro)


def _check_given_up(rank: int) -> None:
    """An abandoned step leaves nothing in the node sums, nor in the count of backwards."""
    values = []
    for gives_up in (False, True):
        model = new_model()
        with zero_optimizer(model, **MODE, ranks_per_node=1, gradient_accumulation_steps=2) as optimizer:
            if gives_up:
                loss_of(model, *batch(8, 0, rank)).backward()
                optimizer.zero_grad()
            train(model, optimizer, rank, steps=1, num_micro=2)
            values.append(full_values(model))
    assert_same_bits(*values)


def test_a_step_that_is_given_up_leaves_nothing_in_the_sums_of_a_node() -> None:
    run_ranks(2, _check_given_up)


def test_memory() -> None:
    run_ranks(4, _check_memory)


def test_estimate_shows_what_it_takes() -> None:
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "zcomm": {"mode": "delta_hpz"}}
    counts = zero.Counts(numel=10**9, largest_unit=10**8)
    for num_micro, sums in ((1, None), (4, 10**9)):
        found = zero.estimate(
            counts, config | {"gradient_accumulation_steps": num_micro}, nodes=2, ranks=4, prints=False
        )
        by_kind = {usage.kind: usage.nbytes for usage in found.usage()}
        assert by_kind["secondary partition"] == 2 * 10**9 / 4
        assert 0.25e9 <= by_kind["residuals"] <= 0.253e9
        assert by_kind.get("sums of the node") == sums
    one_node = {usage.kind for usage in zero.estimate(counts, config, nodes=1, ranks=4, prints=False).usage()}
    assert not one_node & {"secondary partition", "residuals", "sums of the node"}
