"""Parameters, masters and moments each on any tier: losses and bits equal those without offload.

All cases update with zero.CPUAdam. By default they cover all combinations of any two options; with
ZERO_DIFFERENTIAL=full all 768 cases run.
"""

# covers zero/_storage/transfer_counters.py

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import zero
from tests.covering import covering_set, full_product
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import assert_same_bits, full_values, zero_optimizer
from zero._storage.transfer_counters import moved

IS_FULL = os.environ.get("ZERO_DIFFERENTIAL") == "full"
pytestmark = [pytest.mark.timeout(1800)] if IS_FULL else []
STEPS, OVERFLOWS_AT = 2, 0
MOST_AT_ONCE = 48
"""Ranks times cases of one call."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}},
}
PLUS = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
FACTORS: dict[str, list[Any]] = {
    "states": ["none", "cpu", "part", "nvme"],
    "precision": list(PRECISIONS),
    "loop": [(1, 0.0), (2, 0.5)],
    "plus": [False, True],
    "overlaps": [False, True],
}
"""``states``: with masters and gradients; "part" of them on the host. ``loop``: micro-batches a step, and the largest
gradient norm. ``overlaps``: communication with computation, and files with the update."""
BELOW_STAGE_3 = {"stage": [1, 2], "parameters": ["none"], **FACTORS}
STAGE_3 = {"stage": [3], "parameters": ["none", "cpu", "nvme"], **FACTORS}
ON_NODES = STAGE_3 | {"plus": [True], "secondary": ["device", "cpu"]}
"""With ZeRO++: quantized weights and gradients, and a secondary partition."""


class Run(NamedTuple):
    """The results of a training run."""

    losses: list[float]
    values: dict[str, torch.Tensor]


def _cases(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return full_product(factors) if IS_FULL else covering_set(factors, 2)


def _offload(device: str, folder: str) -> dict[str, Any]:
    if device == "part":
        return {"device": "cpu", "ratio": 0.6}
    return {"device": device, "nvme_path": folder} if device == "nvme" else {"device": device}


def _options(case: dict[str, Any], ranks_per_node: int, folder: str) -> dict[str, Any]:
    num_micro, max_norm = case["loop"]
    options: dict[str, Any] = {
        "stage": case["stage"],
        "ranks_per_node": ranks_per_node,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": max_norm,
        "sub_group_size": 1601,
        "overlap_comm": case["overlaps"],
        "offload_optimizer": _offload(case["states"], folder)
        | {"pipeline_read": case["overlaps"], "pipeline_write": case["overlaps"]},
        **PRECISIONS[case["precision"]],
    }
    if not case["is_plain"]:
        options |= {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
    if case["stage"] == 3:
        in_files = {"max_in_cpu": 0, "buffer_size": 600} if case["parameters"] == "nvme" else {}
        options["offload_param"] = _offload(case["parameters"], folder) | in_files
    if case["plus"]:
        options |= PLUS
    if "secondary" in case:
        options |= {"zero_hpz_partition_size": ranks_per_node, "hpz_secondary_device": case["secondary"]}
    return options


def _train(rank: int, case: dict[str, Any], ranks_per_node: int, folder: str) -> Run:
    """Two steps; in fp16 the first overflows on one rank, and all ranks skip it."""
    model, losses, (num_micro, _) = new_model(has_unused=True, has_frozen=True), [], case["loop"]
    optimizer = zero.CPUAdam(groups_of(model), lr=1e-2)
    with zero_optimizer(model, optimizer, **_options(case, ranks_per_node, folder)) as wrapped, moved() as window:
        _check_places(wrapped, case)
        for step in range(STEPS):
            for micro in range(num_micro):
                loss = loss_of(model, *batch(step, micro, rank)) / num_micro
                overflows = case["precision"] == "fp16" and (step, rank) == (OVERFLOWS_AT, 1)
                wrapped.scale(loss * float("inf") if overflows else loss).backward()
                losses.append(loss.item())
            wrapped.step()
            wrapped.zero_grad()
            assert wrapped.was_step_applied == (case["precision"] != "fp16" or step != OVERFLOWS_AT)
        run = Run(losses, full_values(model))
    for kind, tier in (("parameters", case["parameters"]), ("states", case["states"])):
        assert (window.bytes(kind=kind, link="read") > 0) == (tier == "nvme"), (kind, window.table())
        assert (window.bytes(kind=kind, link="write") > 0) == (tier == "nvme"), (kind, window.table())
    return run


def _check_places(optimizer: zero.ZeroOptimizer, case: dict[str, Any]) -> None:
    """Check that the tiers are in effect: otherwise equal bits would prove nothing."""
    report, tier = optimizer.memory(), case["parameters"]
    assert report.shards["device" if tier == "none" else tier] == sum(report.shards.values()) > 0
    assert (report.states_in_files > 0) == (case["states"] == "nvme")
    assert report.states < report.formula / 10 or case["states"] != "nvme"  # frozen ones that are sent quantized stay
    if "secondary" in case:
        place = "in host memory" if case["secondary"] == "cpu" else "on the device"
        assert f"secondary partition (hpZ) on, {place}" in str(optimizer.effective)


def _check(rank: int, cases: list[dict[str, Any]], ranks_per_node: int, folder: str) -> None:
    known: dict[str, Run] = {}
    for case in cases:
        secondary = {"secondary": "device"} if "secondary" in case else {}
        in_memory = {"parameters": "none", "states": "none", "overlaps": False, "is_plain": True}
        plain = case | in_memory | secondary
        if repr(plain) not in known:
            known[repr(plain)] = _train(rank, plain, ranks_per_node, folder)
        got = _train(rank, case | {"is_plain": False}, ranks_per_node, folder)
        assert got.losses == known[repr(plain)].losses, case
        assert_same_bits(got.values, known[repr(plain)].values)
    assert not list(Path(folder).glob(f"*rank{rank}"))


def _run(world_size: int, cases: list[dict[str, Any]], precision: str, folder: Path) -> None:
    """Run the cases of one precision in parts that end in time; cases with the same plain training are adjacent."""
    cases = [case for case in cases if case["precision"] == precision]
    cases.sort(key=lambda case: [case[name] for name in ("stage", "plus", "loop")])
    for first in range(0, len(cases), MOST_AT_ONCE // world_size):
        run_ranks(world_size, _check, cases[first : first + MOST_AT_ONCE // world_size], 2, str(folder))


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_stages_1_to_3_on_two_ranks(precision: str, tmp_path: Path) -> None:
    _run(2, [*_cases(BELOW_STAGE_3), *_cases(STAGE_3)], precision, tmp_path)


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_zeropp_on_two_nodes(precision: str, tmp_path: Path) -> None:
    _run(4, _cases(ON_NODES), precision, tmp_path)
