"""What a simulated job does, and what must hold of it afterwards.

    draw(level, seed) --> Scenario --run--> Result: a problem, or none; the checksum of its events

Properties, after every run:
    P1  No deadlock: no rank waits when nothing can happen any more.
    P2  All live ranks end alike: with results, or all with an error of the library that names what happened.
    P3  Without a fault, results are those that another order of events gives: the same losses and parameters, bit by
        bit, and the same parameters on every rank. Results of protocols are known.
    P4  Ranks that make different calls all get a DivergedError, and what they call next works.
    P5  Of what is left on a disk that lost its power, or of a job that lost a rank, the last checkpoint that every rank
        was told of loads, or a later one, complete.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import zcomm
import zero
from tests.simulation import checkpoints
from tests.simulation.definition import Fault, Result, Scenario
from zcomm import CommunicationError, DivergedError, control
from zcomm._base.rank_context import clock
from zcomm._transport.backend import gather_ints
from zcomm._transport.store_exchange import exchange_texts
from zcomm.testing import Deadlock, Outcome, Simulation
from zero._ranks.rank_errors import on_every_rank

MODES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "persistent": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "zero++": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    },
    "delta": {"stage": 1, "mode": "delta"},
    "delta_hpz": {"stage": 3, "stage3_param_persistence_threshold": 0, "mode": "delta_hpz"},
    "offloaded": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "delayed": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "delayed_update": True, "delay_start": 1},
}
TIMEOUT = timedelta(seconds=20)
"""Of groups and the store; longer than the deadlock watch takes."""
SHORT = timedelta(seconds=1)
"""Of exchanges through the store."""
OPERATIONS = ("topology", "close", "companion", "background", "agree", "one fails", "any", "texts", "ints", "broadcast")
TRAINING_CALLS = ("clip", "no_sync", "evaluate", "gather", "state_dict")


class Alone(Exception):  # noqa: N818
    """What a program raises on one rank."""


def draw(level: str, seed: int) -> Scenario:
    """The scenario of ``seed``."""
    if level == "checkpoints":
        return checkpoints.draw(seed)
    rng = random.Random(f"{level} {seed}")
    if level == "protocols":
        world_size = rng.choice((2, 3, 4))
        calls = tuple(rng.choice(OPERATIONS) for _ in range(rng.randint(2, 5)))
        scenario = Scenario(level, seed, world_size, 1 if world_size == 3 else rng.choice((1, 2)), calls)
        span, kinds = 60, ("", "raises", "dies", "differs", "late")
    else:
        world_size = rng.choice((2, 2, 4))
        steps = [rng.choice((*TRAINING_CALLS, "step", "step")) for _ in range(rng.randint(1, 3))]
        per_node = 2 if world_size == 4 else rng.choice((1, 2))
        scenario = Scenario(level, seed, world_size, per_node, (*steps, "step"), rng.choice(tuple(MODES)))
        span = 1200
        kinds = ("", "raises", "dies")
    kind = rng.choice(kinds)
    watched = [number for number, call in enumerate(scenario.calls) if call in NEED_TOPOLOGY]
    if not kind or (kind == "differs" and not watched):
        return scenario
    if kind == "differs":
        return replace(scenario, fault=Fault(kind, rng.randrange(world_size), rng.choice(watched)))
    at = rng.randrange(span) if kind == "dies" else rng.randrange(len(scenario.calls) + 1)
    return replace(scenario, fault=Fault(kind, rng.randrange(world_size), at))


def run(scenario: Scenario, trace: list[str] | None = None) -> Result:
    """Run ``scenario`` and check the properties."""
    if scenario.level == "checkpoints":
        return checkpoints.run(scenario, trace)
    outcomes, simulation = _outcomes(scenario, trace)
    scheduler = simulation.scheduler
    return Result(_problem(scenario, outcomes), scheduler.digest, scheduler.num_events)


def _outcomes(scenario: Scenario, trace: list[str] | None = None) -> tuple[list[Outcome], Simulation]:
    logging.disable(logging.CRITICAL)
    simulation = Simulation(scenario.world_size, scenario.seed, timeout_s=TIMEOUT.total_seconds(), limit_s=10_000.0)
    simulation.scheduler.trace = trace
    fault = scenario.fault
    if fault is not None and fault.kind == "dies":
        simulation.scheduler.at[fault.at] = partial(simulation.kill, fault.rank)
    program = _protocols if scenario.level == "protocols" else _training
    return simulation.run(partial(program, scenario)), simulation


def _problem(scenario: Scenario, outcomes: list[Outcome]) -> str:
    fault, live = scenario.fault, [(rank, one) for rank, one in enumerate(outcomes) if not one.is_killed]
    for rank, one in live:
        is_alone = isinstance(one.error, Alone) and fault is not None and rank == fault.rank
        if isinstance(one.error, Deadlock):
            return f"P1: rank {rank}: {one.error}"
        if one.error is not None and not is_alone and not isinstance(one.error, (CommunicationError, DivergedError)):
            return f"P2: rank {rank} ends with {one.error!r}"
    if all(one.error is None for _, one in live):
        is_known = scenario.level == "protocols"
        expected = _known(scenario) if is_known else _reference(replace(scenario, seed=0, fault=None))
        wrong = [(rank, one.result) for rank, one in live if repr(one.result) != expected[rank]]
        return f"P3: rank {wrong[0][0]} has {wrong[0][1]}, and not {expected[wrong[0][0]]}" if wrong else ""
    if fault is None:
        return f"P2: without a fault ranks end with {[one.error for _, one in live]!r}"
    alike = [one for rank, one in live if fault.kind != "raises" or rank != fault.rank]
    if fault.kind != "dies" and len({type(one.error) for one in alike}) > 1:
        return f"P2: rank {fault.rank} {fault.kind}, and ranks end with {[one.error for one in alike]!r}"
    return ""


def _known(scenario: Scenario) -> list[str]:
    """What each rank's program returns at the level of protocols."""
    fault, world_size = scenario.fault, scenario.world_size
    return [
        repr(
            [
                "diverged"
                if fault is not None and (fault.kind, fault.at) == ("differs", number)
                else EXPECTED[call](world_size, rank)
                for number, call in enumerate(scenario.calls)
                if call in CALLS
            ]
        )
        for rank in range(world_size)
    ]


@cache
def _reference(scenario: Scenario) -> list[str]:
    outcomes, _ = _outcomes(scenario)
    return [repr(one.result) for one in outcomes]


def _point(scenario: Scenario, rank: int, number: int) -> None:
    fault = scenario.fault
    if fault is None or (fault.rank, fault.at) != (rank, number):
        return
    if fault.kind == "raises":
        raise Alone(f"before call {number}")
    if fault.kind == "late":
        timeout = (SHORT if scenario.calls[number : number + 1] == ("texts",) else TIMEOUT).total_seconds()
        clock().sleep(timeout * random.Random(scenario.seed).uniform(0.98, 1.02))


def _protocols(scenario: Scenario, rank: int) -> list[Any]:
    """Control exchanges without tensors to speak of."""
    results: list[Any] = []
    opened: list[zcomm.Topology] = []
    for number, call in enumerate((*scenario.calls, "")):
        _point(scenario, rank, number)
        if call == "topology" or (not opened and call in NEED_TOPOLOGY):
            opened.append(zcomm.Topology(ranks_per_node=scenario.ranks_per_node))
        if call == "close" and opened:
            opened.pop().close()
        elif call in CALLS:
            fault, own = scenario.fault, CALLS[call]
            differs = fault is not None and (fault.kind, fault.at) == ("differs", number)
            if differs and fault is not None and fault.rank == rank:
                own = _another_call
            try:
                results.append(own(scenario.world_size, rank, opened[-1] if opened else None))
            except DivergedError:
                if not differs:
                    raise
                results.append("diverged")
    for topology in opened:
        topology.close()
    return results


def _another_call(world_size: int, rank: int, topology: Any) -> str:
    control.gather_float64(torch.zeros(3, dtype=torch.float64), topology)
    return "not diverged"


def _one_fails(world_size: int, rank: int, topology: Any) -> str:
    def call() -> None:
        if rank == world_size - 1:
            raise Alone("inside an agreement")

    try:
        on_every_rank(call, topology)
    except (Alone, CommunicationError, DivergedError) as error:
        if not isinstance(error, Alone):  # another rank is dead or elsewhere
            raise
        return "Alone"
    except Exception as error:
        return type(error).__name__ + ("" if "inside an agreement" in str(error) else " without the reason")
    return "nothing"


def _texts(world_size: int, rank: int, _: Any) -> list[str]:
    return exchange_texts(list(range(world_size)), f"from {rank}", lane="simulated", timeout=SHORT)


def _broadcast(world_size: int, rank: int, topology: Any) -> list[float]:
    values = torch.full((5,), float(rank))
    control.broadcast_(values, world_size - 1, topology)
    control.any_(torch.tensor(rank == 0), topology)  # a rank may end its part of a broadcast before others start theirs
    return values.tolist()


def _background(world_size: int, rank: int, topology: Any) -> list[int]:
    background = topology.background
    return list(background.submit(lambda: gather_ints(rank, background.group)).result())


CALLS: dict[str, Callable[[int, int, Any], Any]] = {
    "companion": lambda _, rank, topology: control.any_(torch.tensor(rank == 1), topology.companion).item(),
    "background": _background,
    "agree": lambda _, rank, topology: on_every_rank(lambda: rank, topology),
    "one fails": _one_fails,
    "any": lambda _, rank, topology: control.any_(torch.tensor(rank == 0), topology).item(),
    "texts": _texts,
    "ints": lambda _, rank, __: gather_ints(rank, None),
    "broadcast": _broadcast,
}
EXPECTED: dict[str, Callable[[int, int], Any]] = {
    "companion": lambda world_size, _: world_size > 1,
    "background": lambda world_size, _: list(range(world_size)),
    "agree": lambda _, rank: rank,
    "one fails": lambda world_size, rank: "Alone" if rank == world_size - 1 else "StateError",
    "any": lambda _, __: True,
    "texts": lambda world_size, _: [f"from {rank}" for rank in range(world_size)],
    "ints": lambda world_size, _: list(range(world_size)),
    "broadcast": lambda world_size, _: [world_size - 1.0] * 5,
}
NEED_TOPOLOGY = ("companion", "background", "agree", "one fails", "any", "broadcast")


def _training(scenario: Scenario, rank: int) -> list[Any]:
    """Steps of a tiny model."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 8
    options = dict(MODES[scenario.mode])
    if options.get("zero_hpz_partition_size"):
        options["zero_hpz_partition_size"] = scenario.ranks_per_node
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, ranks_per_node=scenario.ranks_per_node, **options)
    results: list[Any] = []
    for number, call in enumerate((*scenario.calls, "")):
        _point(scenario, rank, number)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))
        if call in ("step", "clip", "no_sync"):
            if call == "no_sync":
                with optimizer.no_sync():
                    model(x).square().mean().backward()
            loss = model(x).square().mean()
            loss.backward()
            if call == "clip":
                results.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.item())
        elif call == "evaluate":
            with torch.no_grad():
                results.append(model(x).sum().item())
        elif call == "state_dict":
            results.append(sorted((name, value.sum().item()) for name, value in model.state_dict().items()))
        elif call == "gather":
            results.append(_parameters(model))
    optimizer.finish_update()
    results.append(_parameters(model))
    optimizer.close()
    return results


def _parameters(model: nn.Module) -> str:
    with zero.GatheredParameters(list(model.parameters())):
        return repr([param.detach().sum().item() for param in model.parameters()])


def smaller(scenario: Scenario) -> list[Scenario]:
    """Scenarios with less in them, the smallest first."""
    found = []
    if scenario.fault is not None:
        found.append(replace(scenario, fault=None))
    for world_size in range(2, scenario.world_size):
        fault = scenario.fault
        if fault is None or fault.rank < world_size:
            found.append(replace(scenario, world_size=world_size, ranks_per_node=1))
    found += [
        replace(scenario, calls=scenario.calls[:index] + scenario.calls[index + 1 :])
        for index in range(len(scenario.calls))
    ]
    return found


def minimised(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """A scenario that fails, and whose smaller ones do not."""
    while True:
        candidate = next((one for one in smaller(scenario) if fails(one)), None)
        if candidate is None:
            return scenario
        scenario = candidate
