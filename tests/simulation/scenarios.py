"""What a simulated job does, and what must hold of it afterwards.

    draw(level, seed) --> Scenario --run--> Result: a problem, or none; the checksum of its events

Properties, after every run:
    P1  No deadlock: no rank waits when nothing can happen any more.
    P2  All live ranks end alike: with results, or all with an error of the library.
    P3  Without an error, results are those that another order of events gives: the same losses and parameters, bit by
        bit, and the same parameters on every rank; in exact modes those of plain training. Results of protocols are
        known. Ranks survive messages that take long, a rank that is stopped for less than the timeout, a job that
        starts again, and a call of one rank alone (P4).
    P4  Where one rank makes another call than the others, every rank that waits gets a DivergedError, and what they
        call next works.
    P5  Of what is left on a disk that lost its power, or of a job that lost a rank, the last checkpoint that every rank
        was told of loads, or a later one, complete.
    P6  After a step that has failed on a file, all ranks have the parameters from before it, or from after it.
    P7  Nothing is read after its release: half of the runs fill what is released with NaN.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial

import torch

from tests.simulation import checkpoints, protocols, training
from tests.simulation.definition import Alone, Fault, Result, Scenario
from tests.variables import variables
from zcomm import DivergedError, ZcommError
from zcomm.testing import Deadlock, Outcome, Simulation

LATENCY_S = 0.5, 3.0
"""Of a slow network."""
STOPPED_S = 0.1, 12.0
DIVERGED_AFTER_S = "5"
SURVIVED = ("slow", "stopped", "restarts", *protocols.ALONE_FAULTS)


def draw(level: str, seed: int) -> Scenario:
    """The scenario of ``seed``."""
    return {"checkpoints": checkpoints, "protocols": protocols, "training": training}[level].draw(seed)


def run(scenario: Scenario, trace: list[str] | None = None) -> Result:
    """Run ``scenario`` and check the properties."""
    if scenario.level == "checkpoints":
        return checkpoints.run(scenario, trace)
    outcomes, simulation = _outcomes(scenario, trace)
    scheduler = simulation.scheduler
    return Result(_problem(scenario, outcomes), scheduler.digest, scheduler.num_events)


def _outcomes(
    scenario: Scenario, trace: list[str] | None = None, history: list[list[str]] | None = None
) -> tuple[list[Outcome], Simulation]:
    logging.disable(logging.CRITICAL)
    fault, rng = scenario.fault, random.Random(f"fault of {scenario.seed}")
    program = partial(protocols.program, scenario)
    values = {"ZCOMM_DIVERGED_AFTER_S": DIVERGED_AFTER_S}
    if scenario.level == "training":
        program = partial(training.program, scenario, history=history)
        values |= {"ZERO_DEBUG": "1"} if scenario.seed % 2 else {}
    if scenario.seed % 3 == 1 or (fault is not None and fault.kind == "flips"):
        values["ZCOMM_CHECK"] = "1"
    if fault is not None and fault.kind == "restarts":
        values["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with ExitStack() as stack:
        stack.enter_context(variables(**values))
        simulation = _simulation(scenario, trace)
        if fault is not None:
            _prepare(fault, simulation, rng)
        outcomes = simulation.run(program)
        if fault is not None and fault.kind == "restarts" and any(one.is_killed for one in outcomes):
            simulation = _simulation(scenario, trace, after=simulation)
            outcomes = simulation.run(program)
    return outcomes, simulation


def _simulation(scenario: Scenario, trace: list[str] | None, after: Simulation | None = None) -> Simulation:
    is_slow = scenario.fault is not None and scenario.fault.kind == "slow"
    simulation = Simulation(
        scenario.world_size,
        scenario.seed,
        timeout_s=protocols.TIMEOUT.total_seconds() * (10 if is_slow else 1),
        limit_s=10_000.0,
        limit_events=300_000,
        after=after,
    )
    simulation.scheduler.trace = trace
    return simulation


def _prepare(fault: Fault, simulation: Simulation, rng: random.Random) -> None:
    """Let ``fault`` happen."""
    scheduler, network = simulation.scheduler, simulation.network

    def restart() -> None:  # torchrun's agents end the others a moment later
        simulation.kill(fault.rank)
        for rank in range(simulation.world_size):
            if rank != fault.rank:
                scheduler.after(rng.uniform(0.0, 3.0), partial(simulation.kill, rank))

    at_event: dict[str, Callable[[], None]] = {
        "dies": partial(simulation.kill, fault.rank),
        "restarts": restart,
        "interrupted": partial(simulation.interrupt, fault.rank),
        "stopped": partial(simulation.stop, fault.rank, rng.uniform(*STOPPED_S)),
    }
    if fault.kind in at_event:
        scheduler.at[fault.at] = at_event[fault.kind]
    elif fault.kind == "slow":
        network.latency_s = LATENCY_S
    elif fault.kind == "flips":
        network.flip = _flip_of_message(fault.at, rng)
    elif fault.kind == "file errors":
        simulation.files_fail_after[fault.rank] = fault.at


def _flip_of_message(number: int, rng: random.Random) -> Callable[[torch.Tensor], None]:
    left = [number]

    def flip(received: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == 0 and received.numel():
            received[rng.randrange(received.numel())] ^= 1 << rng.randrange(8)

    return flip


def _problem(scenario: Scenario, outcomes: list[Outcome]) -> str:
    fault, live = scenario.fault, [(rank, one) for rank, one in enumerate(outcomes) if not one.is_killed]
    for rank, one in live:
        if isinstance(one.error, Deadlock):
            return f"P1: rank {rank}: {one.error}"
        if one.error is not None and not _is_named(one.error, fault, rank):
            return f"P2: rank {rank} ends with {one.error!r}"
    if all(one.error is None for _, one in live):
        return _wrong_results(scenario, live)
    if fault is None or (fault.kind in SURVIVED and not _has_short_timeout(scenario)):
        return f"P2: ranks end with {[one.error for _, one in live]!r}"
    has_own_error = fault.kind in ("raises", "interrupted")
    alike = {_ending(one) for rank, one in live if not has_own_error or rank != fault.rank}
    if fault.kind == "late":  # a rank whose timeout ends with the last exchange is alone
        alike.discard(type(None))
    may_differ = fault.kind in ("dies", "interrupted") or "part" in scenario.calls  # ranks outside need not notice
    if len(alike) > 1 and not may_differ:
        return f"P2: rank {fault.rank} {fault.kind}, and ranks end with {[one.error for _, one in live]!r}"
    return ""


def _ending(outcome: Outcome) -> type[BaseException | None]:
    """The class of what a rank ended with; a training program expects a DivergedError in "uneven", and catches it."""
    is_caught = isinstance(outcome.result, list) and "diverged" in outcome.result
    return DivergedError if is_caught else type(outcome.error)


def _is_named(error: BaseException, fault: Fault | None, rank: int) -> bool:
    """Whether ``error`` names what happened, or is the fault itself."""
    if fault is not None and rank == fault.rank:
        own = {"raises": Alone, "interrupted": KeyboardInterrupt}.get(fault.kind)
        if own is not None and isinstance(error, own):
            return True
    return isinstance(error, ZcommError) or (
        fault is not None and fault.kind == "file errors" and isinstance(error, OSError)
    )


def _has_short_timeout(scenario: Scenario) -> bool:
    """Whether a rank may come too late to a store exchange."""
    return scenario.fault is not None and scenario.fault.kind != "restarts" and "texts" in scenario.calls


def _wrong_results(scenario: Scenario, live: list[tuple[int, Outcome]]) -> str:
    failed = {str(one.result) for _, one in live if training.FAILED in repr(one.result)}
    if failed:
        states = _history(replace(scenario, seed=0, fault=None))
        found = {one.result[-1] for _, one in live}
        is_state = len(failed) == 1 and found <= {state for of_rank in states for state in of_rank}
        return "" if is_state else f"P6: after a failed step ranks have {found}"
    if scenario.level == "protocols":
        expected = protocols.known(scenario)
    else:
        expected = _reference(replace(scenario, seed=0, fault=None))
        values = training.oracle(scenario) if scenario.mode in training.EXACT else None
        for rank, one in live:
            if values and "diverged" not in one.result and not training.is_close(one.result, values[rank]):
                return f"P3: rank {rank} has {one.result}, and plain training {values[rank]}"
    wrong = [(rank, one.result) for rank, one in live if repr(one.result) != expected[rank]]
    return f"P3: rank {wrong[0][0]} has {wrong[0][1]}, and not {expected[wrong[0][0]]}" if wrong else ""


@cache
def _reference(scenario: Scenario) -> list[str]:
    outcomes, _ = _outcomes(scenario)
    return [repr(one.result) for one in outcomes]


@cache
def _history(scenario: Scenario) -> list[list[str]]:
    history: list[list[str]] = [[] for _ in range(scenario.world_size)]
    _outcomes(scenario, history=history)
    return history


def smaller(scenario: Scenario) -> list[Scenario]:
    """Scenarios with less in them, the smallest first."""
    found = []
    if scenario.fault is not None:
        found.append(replace(scenario, fault=None))
    for world_size in range(2, scenario.world_size):
        fault = scenario.fault
        if fault is None or fault.rank < world_size:
            found.append(replace(scenario, world_size=world_size, ranks_per_node=1))
    found += [_without(scenario, number) for number in range(len(scenario.calls))]
    return found


def _without(scenario: Scenario, number: int) -> Scenario:
    """``scenario`` without call ``number``; a fault at a later call stays there, one at this call goes with it."""
    fault = scenario.fault
    if fault is not None and fault.kind in protocols.AT_CALL and fault.at >= number:
        fault = None if fault.at == number else replace(fault, at=fault.at - 1)
    return replace(scenario, calls=scenario.calls[:number] + scenario.calls[number + 1 :], fault=fault)


def minimised(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """A scenario that fails, and whose smaller ones do not."""
    while True:
        candidate = next((one for one in smaller(scenario) if fails(one)), None)
        if candidate is None:
            return scenario
        scenario = candidate
