"""Simulated saves: ranks write checkpoints, some of them in the background, until the power fails or a rank dies.

Then what is left on the disk is loaded by a new job, on another number of ranks (P5 of scenarios.py).
"""

from __future__ import annotations

import errno
import logging
import os
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import zero
from tests.simulation.definition import Fault, Result, Scenario
from zcomm import CommunicationError, DivergedError
from zcomm.testing import Simulation
from zcomm.testing.disk import SimulatedDisk

TIMEOUT_S = 20.0
TAGS = ("again", "again", "other", "async again", "async other")


def draw(seed: int) -> Scenario:
    """The scenario of ``seed``."""
    rng = random.Random(f"checkpoints {seed}")
    tags = tuple(rng.choice(TAGS) for _ in range(rng.randint(1, 3)))
    world_size = rng.choice((1, 2, 2, 3))
    scenario = Scenario("checkpoints", seed, world_size, 1, tags)
    kind = rng.choice(("", "power", "power", "power", "full", "dies" if world_size > 1 else "power"))
    if not kind:
        return scenario
    at = rng.randrange(24 * len(tags)) if kind == "power" else rng.randrange(40 + 150 * len(tags) * world_size)
    return replace(scenario, fault=Fault(kind, rng.randrange(world_size), at))


def run(scenario: Scenario, trace: list[str] | None = None) -> Result:
    """Save until the fault, then load what is left."""
    logging.disable(logging.CRITICAL)
    # Checkpoints hold the states of random generators, as numbers of more or fewer digits.
    torch.manual_seed(scenario.seed)
    random.seed(scenario.seed)
    np.random.seed(scenario.seed % 2**32)
    rng, told = random.Random(scenario.seed), [0] * scenario.world_size
    with tempfile.TemporaryDirectory() as name:
        root, left = Path(name, "disk"), Path(name, "left")
        root.mkdir()
        left.mkdir()
        simulation = Simulation(scenario.world_size, scenario.seed, timeout_s=TIMEOUT_S, limit_s=10_000.0)
        simulation.scheduler.trace = trace
        disk, fault = SimulatedDisk(root, simulation.scheduler), scenario.fault
        reached: list[int] = []

        def lose_power() -> None:
            disk.left_after_power_failure(rng, left)
            reached.append(min(told))
            for rank in range(scenario.world_size):
                simulation.kill(rank)

        kind = "" if fault is None else fault.kind
        if kind == "full":
            disk.full_after[fault.rank] = fault.at
        elif kind == "power":
            disk.fails_at = fault.at, lose_power
        elif kind == "dies":
            simulation.scheduler.at[fault.at] = partial(simulation.kill, fault.rank)
        with disk.recording():
            outcomes = simulation.run(partial(_save, scenario, root, told))
        problem = _problem_of_saves(scenario, outcomes)
        if kind == "power" and not reached:  # all was saved before
            lose_power()
        where, scheduler = left if reached else root, simulation.scheduler  # a rank that dies leaves the disk
        if not problem:
            loaded = Simulation(rng.choice((1, 2)), scenario.seed, timeout_s=TIMEOUT_S).run(partial(_load, where))
            problem = _problem_of_loads(loaded, least=reached[0] if reached else min(told), most=len(scenario.calls))
        return Result(problem, scheduler.digest, scheduler.num_events)


def _problem_of_saves(scenario: Scenario, outcomes: list[Any]) -> str:
    for rank, one in enumerate(outcomes):
        is_named = isinstance(one.error, (CommunicationError, DivergedError, zero.CheckpointError))
        if one.error is not None and not one.is_killed and (scenario.fault is None or not is_named):
            return f"P2: rank {rank} ends with {one.error!r}"
    endings = {str(one.error) for one in outcomes}
    if scenario.fault is not None and scenario.fault.kind == "full":
        is_named = endings == {"None"} or os.strerror(errno.ENOSPC) in "".join(endings)
        if len(endings) > 1 or not is_named:
            return f"P2: a full disk of rank {scenario.fault.rank}: ranks end with {[one.error for one in outcomes]!r}"
    return ""


def _problem_of_loads(outcomes: list[Any], *, least: int, most: int) -> str:
    steps = set()
    for rank, one in enumerate(outcomes):
        if one.error is not None:
            return f"P5: rank {rank} cannot load: {one.error!r}"
        step, values = one.result
        steps.add(step)
        if step and values != [float(step)]:
            return f"P5: rank {rank} has loaded {values} as those of step {step}"
    found = steps.pop()
    if steps or not least <= found <= most:
        return f"P5: step {found} is loaded; ranks were told of step {least}, of {most}"
    return ""


def _save(scenario: Scenario, root: Path, told: list[int], rank: int) -> None:
    model = nn.Linear(3, 3, bias=False)
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=1, ranks_per_node=1)
    saving = None
    in_background: Any = None
    for step, name in enumerate(scenario.calls, 1):
        for _, _, values in optimizer.master_pieces():
            values.fill_(step)
        is_async, tag = name.startswith("async "), name.removeprefix("async ")
        saving = zero.save_checkpoint(
            optimizer, root / "new" / "saved", tag, client_state={"step": step}, async_op=is_async
        )
        told[rank] = step - is_async  # a save waits for the one before it
        in_background = saving if is_async else None
    if in_background is not None:
        in_background.wait()
        told[rank] = len(scenario.calls)
    optimizer.close()


def _load(folder: Path, rank: int) -> tuple[int, list[float]]:
    model = nn.Linear(3, 3, bias=False)
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=1, ranks_per_node=1)
    path, state = zero.load_checkpoint(optimizer, folder / "new" / "saved")
    optimizer.close()
    return (0 if path is None else int(state["step"])), model.weight.unique().tolist()
