"""``mode="delta"``, stages 1 and 2: equals plain training if nothing is rounded, and the NumPy oracle otherwise."""

# covers zero/_modes/delta.py zcomm/control.py zero/utils.py

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zcomm
import zero
from tests.ranks import run_ranks, topology
from tests.variables import variables
from tests.zcomm import oracle
from tests.zero.deltas import (
    check_an_overflow_changes_nothing,
    check_drift,
    check_goes_on_from_a_checkpoint,
    check_offload,
    check_ranks_agree,
    check_writes,
    everything_of,
)
from tests.zero.models import as_vector, groups_of, new_model, relative_error, train_plain
from tests.zero.test_delta_hpz import INT4, RATE, SIZE, Aligned, _gradient, _loss, _rounded
from tests.zero.training import assert_same_bits, train, zero_optimizer
from zcomm import ConfigError, StateError, control
from zero import ZeroOptimizer

MODE: dict[str, Any] = {"mode": "delta", "changes": "quantized", "ranks_per_node": 2}


def _check_exact(rank: int) -> None:
    options = {"has_frozen": True, "has_unused": True}
    for stage, num_micro in ((1, 1), (2, 3)):
        plain, model = new_model(**options), new_model(**options)
        reference = torch.optim.AdamW(groups_of(plain), lr=1e-2)
        norms = train_plain(plain, reference, world_size=4, steps=3, num_micro=num_micro, max_norm=0.5)
        with zero_optimizer(
            model, stage=stage, weight_format="none", gradient_accumulation_steps=num_micro, **MODE
        ) as optimizer:
            got = train(model, optimizer, rank, steps=3, num_micro=num_micro, max_norm=0.5)
            assert got == pytest.approx(norms, rel=1e-5)
        assert relative_error(as_vector(model.parameters()), as_vector(plain.parameters())) < 1e-5


class Oracle:
    """One process that plays 2 nodes x 2 ranks: SGD on the masters, the wire in NumPy. Shard l * 2 + n is (n, l)'s."""

    def __init__(self, weights: Tensor) -> None:
        self.held = weights.float().flatten().numpy().reshape(4, -1)  # bfloat16 values
        self.masters = self.held.copy()

    def step(self, step: int) -> None:
        grads = [_gradient(self.held.reshape(-1), step, 0, rank).reshape(4, 256) for rank in range(4)]
        total = (grads[0] + grads[1]) + (grads[2] + grads[3])
        self.masters -= np.float32(RATE) * (total / np.float32(4))
        for shard in range(4):
            target = _rounded(self.masters[shard])
            change = oracle.decode([target - self.held[shard]], INT4)[0]
            self.held[shard] = _rounded(self.held[shard] + change)


def _check_against_oracle(rank: int) -> None:
    for stage in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
        expected = Oracle(model[0].weight.detach().clone())
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        with zero_optimizer(model, inner, stage=stage, gradient_format="none", **MODE) as optimizer:
            for step in range(4):
                _loss(model, step, 0, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
                expected.step(step)
                assert np.array_equal(model[0].weight.detach().float().flatten().numpy(), expected.held.reshape(-1))
            assert not np.array_equal(expected.held, _rounded(expected.masters)), "changes are quantized"


def test_it_is_plain_training_and_the_oracle() -> None:
    run_ranks(4, _check_exact)
    run_ranks(4, _check_against_oracle)


# What crosses the network.


def _sent(rank: int, per_node: int, **options: Any) -> tuple[list[float], list[float], list[float]]:
    """Bytes of parameters between and inside nodes per step, in units of 2 bytes per element; and other traffic."""
    torch.manual_seed(0)
    model = Aligned(frozen=4096).to(torch.bfloat16)
    trainable = [p for p in model.parameters() if p.requires_grad]
    unit, sums = 2 * sum(p.numel() for p in trainable), []
    with zero_optimizer(model, torch.optim.AdamW(trainable, lr=1e-3), ranks_per_node=per_node, **options) as optimizer:
        t = optimizer.topology
        for step in range(2):
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(10 * rank + step)).to(torch.bfloat16)
            (model(x).float() - 1).square().mean().backward()
            with zcomm.traffic() as sent:
                optimizer.step()
            optimizer.zero_grad()
            gathers = [
                sum(sent.bytes(operation=o, link=link) for o in ("delta_gather", "all_gather"))
                for link in ("inter", "intra")
            ]
            mine = torch.tensor([*gathers, sent.bytes(link="inter")], dtype=torch.float64)
            sums.append((control.gather_float64(mine, t).sum(0) / max(t.num_nodes - 1, 1) / unit).tolist())
        check_ranks_agree(optimizer)
    inter, intra, total = (list(column) for column in zip(*sums, strict=True))
    return inter, intra, total


def _check_traffic(rank: int) -> None:
    for stage in (1, 2):
        inter, intra, total = _sent(rank, 2, stage=stage, mode="delta", changes="quantized")
        assert 0.25 < min(inter) <= max(inter) < 0.27, inter
        assert max(intra) < 0.55, intra
        assert max(total) < 0.28, "step() sends something else"
    assert _sent(rank, 2, stage=2)[0][-1] == pytest.approx(1), "plain stage 2"
    assert 0.25 < _sent(rank, 1, stage=2, mode="delta", changes="quantized")[0][-1] < 0.27, "one rank a node"
    assert max(_sent(rank, 4, stage=2, mode="delta", changes="quantized")[2]) == 0, "one node"


def test_bytes_between_nodes() -> None:
    run_ranks(4, _check_traffic)


# Skipped steps, writes outside of steps, and what is saved.


def _check_skipped_and_unused(rank: int) -> None:
    model = new_model(torch.float32, has_unused=True)
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    with zero_optimizer(model, stage=1, fp16=fp16, **MODE) as optimizer:
        train(model, optimizer, rank, steps=2)
        check_an_overflow_changes_nothing(model, optimizer, rank)
        before = everything_of(model, optimizer)
        with zcomm.traffic() as sent:
            optimizer.step()  # without a gradient nothing changes
        assert sent.bytes(operation="delta_gather") == 0
        assert_same_bits(everything_of(model, optimizer), before)
        optimizer.zero_grad()
        train(model, optimizer, rank, steps=1)
        check_ranks_agree(optimizer)


def _check_debug(rank: int) -> None:
    """float32 parameters are not masters here, so values written to them would be lost: ZERO_DEBUG=1 reports it."""
    with variables(ZERO_DEBUG="1"):
        model = new_model()
        with zero_optimizer(model, stage=1, **MODE) as optimizer:
            saved = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, rank, steps=2)
            optimizer.load_state_dict(saved)
            train(model, optimizer, rank, steps=1)
            with torch.no_grad():
                model.shared.weight.mul_(2)
            with pytest.raises(StateError, match=r"changed since the last step.*shared\.weight"):
                train(model, optimizer, rank, steps=1)


def test_skipped_steps_and_writes() -> None:
    run_ranks(4, _check_skipped_and_unused)
    for dtype in (torch.bfloat16, torch.float32):  # without and with masters that parameters must follow
        run_ranks(4, check_writes, partial(zero_optimizer, stage=2, **MODE), dtype)
    run_ranks(4, _check_debug)


def _save(rank: int, folder: str) -> None:
    check_goes_on_from_a_checkpoint(rank, folder, partial(zero_optimizer, stage=2, **MODE), lambda _: {})
    for options in ({"stage": 1, "mode": "delta"}, {"stage": 3, "mode": "delta_hpz"}, {"stage": 2}):
        other = new_model(torch.bfloat16, has_frozen=True, seed=5)
        with zero_optimizer(other, ranks_per_node=1, **options) as optimizer:
            zero.load_checkpoint(optimizer, folder)
            train(other, optimizer, rank, steps=1)


def test_checkpoints_go_on_with_the_same_bits(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path))


def test_offloaded_states(tmp_path: Path) -> None:
    run_ranks(4, check_offload, str(tmp_path), partial(zero_optimizer, stage=2, **MODE), 1)


def test_parameters_do_not_drift() -> None:
    run_ranks(4, check_drift, partial(zero_optimizer, stage=1, zero_quantized_gradients=True, **MODE))


def _check_refusals(rank: int) -> None:
    refused = (
        ({"stage": 3}, "stage=3; stage 3 has mode='delta_hpz'"),
        ({"stage": 0}, "stage=0"),
        ({"weight_format": "int4:stochastic"}, "rounds stochastically"),
        ({"offload_optimizer": {"device": "cpu"}, "delayed_update": True}, "delayed_update"),
    )
    for options, match in refused:
        given = {"stage": 2, "mode": "delta", "topology": topology(2), "lr": 0.1} | options
        with pytest.raises(ConfigError, match=match):
            ZeroOptimizer(new_model(), torch.optim.SGD, **given)
    config = {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}, "zcomm": {"mode": "delta"}}
    for per_node, described in ((2, "deltas of parameters as int4"), (4, "mode='delta' (one node")):
        optimizer = ZeroOptimizer(new_model(), torch.optim.SGD, lr=0.1, config=config, topology=topology(per_node))
        assert described in str(optimizer.effective)
        assert any("quantized_weights" in reason for reason in optimizer.effective.inactive) == (per_node == 2)
        optimizer.close()


def test_what_it_is_not_combined_with() -> None:
    run_ranks(4, _check_refusals)


def _check_memory(rank: int) -> None:
    """The memory of this rank's shard, beside the full parameters."""
    for dtype in (torch.bfloat16, torch.float32):
        model = Aligned().to(dtype)
        numel = sum(p.numel() for p in model.parameters())
        with zero_optimizer(model, torch.optim.AdamW(model.parameters()), stage=2, **MODE) as optimizer:
            model(torch.full((1, 128), 1.0 + rank, dtype=dtype)).sum().backward()
            optimizer.step()
            report = optimizer.memory()
        config = {
            "zero_optimization": {"stage": 2},
            "zcomm": {"mode": "delta"},
            "bf16": {"enabled": dtype == torch.bfloat16},
        }
        found = zero.estimate(
            zero.Counts(numel=numel, largest_unit=numel), config, nodes=2, ranks=2, prints=False
        ).usage()
        by_kind = {usage.kind: usage.nbytes for usage in found}
        assert report.parameters == by_kind["parameters"] == numel * dtype.itemsize * 5 / 4
        assert report.states == pytest.approx(by_kind["states"], rel=1e-3)


def test_memory_is_as_estimated() -> None:
    run_ranks(4, _check_memory)
