"""Simulated training: steps of a tiny model in every mode."""

from __future__ import annotations

import json
import math
import random
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import zero
from tests.simulation.definition import Scenario
from tests.simulation.protocols import point
from zcomm import DivergedError

SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
MODES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": SHARDED,
    "persistent": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "zero++": {
        **SHARDED, "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2,
    },
    "delta": {"stage": 1, "mode": "delta"},
    "delta_hpz": {**SHARDED, "mode": "delta_hpz"},
    "delta, exact": {"stage": 1, "mode": "delta", "changes": "exact", "bf16": {"enabled": True}},
    "delta_hpz, exact": {**SHARDED, "mode": "delta_hpz", "changes": "exact", "bf16": {"enabled": True}},
    "delta_hpz, coded": {**SHARDED, "mode": "delta_hpz", "gradient_error": 0.15},
    "offloaded": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "delayed": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "delayed_update": True, "delay_start": 1},
    "files": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
    "all in files": {**SHARDED, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}  # fmt: skip
EXACT = ("stage 0", "stage 1", "stage 2", "stage 3", "persistent", "offloaded", "files", "all in files")
"""Modes whose values are those of plain training, but for the order of sums."""
CALLS = ("clip", "no_sync", "evaluate", "gather", "state_dict", "uneven", "in block")
STEPS = ("step", "clip", "no_sync", "uneven", "in block")
FAULTS = ("raises", "dies", "interrupted", "stopped", "slow", "flips", "file errors")
NUM_EVENTS = 1200
FAILED = "a step has failed"


def program(scenario: Scenario, rank: int, history: list[list[str]] | None = None) -> list[Any]:
    """Train; returns losses, values and parameters. ``history`` gets those of this rank before and after each step."""
    with tempfile.TemporaryDirectory() as folder:
        return _train(scenario, rank, folder, None if history is None else history[rank])


def _train(scenario: Scenario, rank: int, folder: str, history: list[str] | None) -> list[Any]:
    model = _model()
    options = {
        key: {**value, "nvme_path": folder} if isinstance(value, dict) and value.get("device") == "nvme" else value
        for key, value in MODES[scenario.mode].items()
    }
    if options.get("zero_hpz_partition_size"):
        options["zero_hpz_partition_size"] = scenario.ranks_per_node
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, ranks_per_node=scenario.ranks_per_node, **options)
    results: list[Any] = []
    for number, call in enumerate((*scenario.calls, "")):
        if history is not None:
            history.append(parameters(model))
        point(scenario, rank, number)
        x = batch(number, rank).to(model[0].bias.dtype)
        try:
            results += _called(call, optimizer, model, x, rank)
        except DivergedError:
            if call != "uneven":
                raise
            return [*results, "diverged"]
        except OSError as error:  # raised on every rank; the step was made on none, or on all
            return [FAILED, error.errno, parameters(model)]
    optimizer.finish_update()
    results.append(parameters(model))
    optimizer.close()
    return results


def _called(call: str, optimizer: zero.ZeroOptimizer, model: nn.Sequential, x: Tensor, rank: int) -> list[Any]:
    """Make ``call``; its results.

    "uneven": the first rank uses one layer alone. "in block": parameters are gathered before
    the step, and used after it.
    """
    results: list[Any] = []
    if call in STEPS:
        if call == "no_sync":
            with optimizer.no_sync():
                model(x).square().mean().backward()
        loss = _loss(call, model, x, rank)
        loss.backward()
        if call == "clip":
            results.append(optimizer.clip_grad_norm_(0.1).item())
        with zero.GatheredParameters(list(model.parameters())) if call == "in block" else nullcontext():
            optimizer.step()
            if call == "in block":
                results.append(model(x).sum().item())
        optimizer.zero_grad()
        results.append(loss.item())
    elif call == "evaluate":
        with torch.no_grad():
            results.append(model(x).sum().item())
    elif call == "state_dict":
        results.append(_sums_by_name(model))
    elif call == "gather":
        results.append(parameters(model))
    return results


def _loss(call: str, model: nn.Sequential, x: Tensor, rank: int) -> Tensor:
    used = model[0] if call == "uneven" and rank == 0 else model
    return used(x).square().mean()


def oracle(scenario: Scenario) -> list[list[Any]]:
    """What each rank's program returns, by plain torch: every rank's gradients of one model are added up."""
    world_size, model = scenario.world_size, _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results: list[list[Any]] = [[] for _ in range(world_size)]
    for number, call in enumerate(scenario.calls):
        for rank in range(world_size):
            x = batch(number, rank)
            if call in STEPS:
                losses = [_loss(call, model, x, rank)] + [_loss("", model, x, rank)] * (call == "no_sync")
                (sum(losses, torch.zeros(())) / world_size).backward()
                results[rank].append(losses[0].item())
            elif call == "evaluate":
                results[rank].append(model(x).sum().item())
            elif call == "state_dict":  # at stage 3 the first rank has it, and no other
                has_it = rank == 0 or MODES[scenario.mode]["stage"] < 3
                results[rank].append(_sums_by_name(model) if has_it else [])
            elif call == "gather":
                results[rank].append(_sums(model))
        if call in STEPS:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1 if call == "clip" else math.inf).item()
            optimizer.step()
            optimizer.zero_grad()
            for rank, of_rank in enumerate(results):  # before the loss
                after = [norm] * (call == "clip")
                after += [model(batch(number, rank)).sum().item()] * (call == "in block")
                of_rank[-1:-1] = after
    return [[*of_rank, _sums(model)] for of_rank in results]


def is_close(found: Any, expected: Any) -> bool:
    """Whether two results are equal but for rounding."""
    if isinstance(expected, str) and expected.startswith("["):
        found, expected = json.loads(found), json.loads(expected)
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-4)
    if isinstance(expected, str):
        return bool(found == expected)
    return len(found) == len(expected) and all(map(is_close, found, expected))


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def _model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 8
    return model


def parameters(model: nn.Module) -> str:
    with zero.GatheredParameters(list(model.parameters())):
        return _sums(model)


def _sums_by_name(model: nn.Module) -> list[tuple[str, float]]:
    return sorted((name, value.sum().item()) for name, value in model.state_dict().items())


def _sums(model: nn.Module) -> str:
    return repr([param.detach().sum().item() for param in model.parameters()])


def draw(seed: int) -> Scenario:
    """The scenario of ``seed``."""
    rng = random.Random(f"training {seed}")
    world_size = rng.choice((2, 2, 4))
    steps = [rng.choice((*CALLS, "step", "step")) for _ in range(rng.randint(1, 3))]
    per_node = 2 if world_size == 4 else rng.choice((1, 2))
    scenario = Scenario("training", seed, world_size, per_node, (*steps, "step"), rng.choice(tuple(MODES)))
    kind = rng.choice(("", *FAULTS))
    if not kind or (kind == "file errors" and "files" not in scenario.mode):
        return scenario
    at = rng.randrange(len(scenario.calls) + 1) if kind == "raises" else rng.randrange(NUM_EVENTS)
    return scenario.with_fault(kind, rng.randrange(world_size), at)
