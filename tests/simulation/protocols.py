"""Simulated protocols: control exchanges, agreements, collectives, groups made and closed; no tensors to speak of."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from tests.simulation.definition import Alone, Fault, Scenario
from zcomm import CommunicationError, DivergedError, Topology, control
from zcomm._base.daemon_threads import end_daemons
from zcomm._base.rank_context import clock
from zcomm._transport.backend import gather_ints
from zcomm._transport.collective_log import failing
from zcomm._transport.store_exchange import exchange_texts
from zero._ranks.rank_errors import on_every_rank

TIMEOUT = timedelta(seconds=20)
"""Of groups and the store; longer than the deadlock watch takes."""
SHORT = timedelta(seconds=1)
"""Of exchanges through the store."""
NUMEL = 320
"""Of a rank's part of a collective."""
ALONE_FAULTS = ("differs", "skips", "extra", "closes", "swaps")
"""What one rank does in place of a call of the others; afterwards all go on, if need be after they have met."""
AT_CALL = ("raises", "late", *ALONE_FAULTS)
"""Faults at a call; others come at an event."""
FAULTS = ("interrupted", "dies", "restarts", "stopped", "slow", "flips", *AT_CALL)
NUM_EVENTS = 60
"""A fault at an event comes within so many for each call."""


def point(scenario: Scenario, rank: int, number: int) -> None:
    """Before call ``number``: where a program may raise, or be late."""
    fault = scenario.fault
    if fault is None or (fault.rank, fault.at) != (rank, number):
        return
    if fault.kind == "raises":
        raise Alone(f"before call {number}")
    if fault.kind == "late":
        timeout = (SHORT if scenario.calls[number : number + 1] == ("texts",) else TIMEOUT).total_seconds()
        clock().sleep(timeout * random.Random(scenario.seed).uniform(0.98, 1.02))


def program(scenario: Scenario, rank: int) -> list[Any]:
    """What a rank does; returns the results of its calls."""
    results: list[Any] = []
    opened: list[Topology] = []
    for number, call in enumerate((*scenario.calls, "")):
        point(scenario, rank, number)
        if call == "topology" or (not opened and call in NEED_TOPOLOGY):
            opened.append(Topology(ranks_per_node=scenario.ranks_per_node))
        if call == "close" and opened:
            opened.pop().close()
        elif call == "reopen" and opened:
            _reopen(opened, scenario, rank)
        elif call in CALLS:
            fault = scenario.fault
            if fault is not None and fault.kind in ALONE_FAULTS and fault.at == number:
                results.append(_one_alone(scenario, fault, rank, opened))
            else:
                results.append(CALLS[call](scenario.world_size, rank, opened[-1] if opened else None))
    for topology in opened:
        topology.close()
    return results


def known(scenario: Scenario) -> list[str]:
    """What each rank's program returns."""
    return [repr([_known(scenario, number, rank) for number, call in enumerate(scenario.calls) if call in CALLS])
            for rank in range(scenario.world_size)]  # fmt: skip


def _known(scenario: Scenario, number: int, rank: int) -> Any:
    fault = scenario.fault
    if fault is not None and fault.kind in ALONE_FAULTS and fault.at == number:
        waits = WAITS[fault.kind][0 if rank == fault.rank else 1]
        return "diverged" if waits else "ended"
    return EXPECTED[scenario.calls[number]](scenario.world_size, rank)


def _reopen(opened: list[Topology], scenario: Scenario, rank: int) -> None:
    """Some ranks close the old topology before they make the new one, others afterwards."""
    old, closes_first = opened.pop(), random.Random(f"{scenario.seed} {rank}").random() < 0.5
    if closes_first:
        old.close()
    opened.append(Topology(ranks_per_node=scenario.ranks_per_node))
    if not closes_first:
        old.close()


WAITS = {
    "differs": (True, True),
    "skips": (False, True),
    "extra": (True, False),
    "closes": (False, True),
    "swaps": (True, True),
}
"""Whether the odd rank, and whether the others, wait in an exchange that cannot end."""


def _one_alone(scenario: Scenario, fault: Fault, rank: int, opened: list[Topology]) -> str:
    is_odd, topology = rank == fault.rank, opened[-1]
    try:
        if fault.kind == "swaps":
            _two_at_once(topology, swapped=is_odd)
        elif is_odd and fault.kind in ("differs", "extra"):
            OTHER_CALLS[scenario.seed % len(OTHER_CALLS)](topology)
        elif is_odd and fault.kind == "closes":
            topology.close()
        elif not is_odd and fault.kind != "extra":
            CALLS[scenario.calls[fault.at]](scenario.world_size, rank, topology)
        outcome = "ended"
    except DivergedError:
        outcome = "diverged"
    if scenario.calls[fault.at] == "async" or not all(WAITS[fault.kind]):  # asynchronous calls raise in their waits
        exchange_texts(list(range(scenario.world_size)), outcome, lane="after a fault", timeout=TIMEOUT)
    if fault.kind == "closes":
        topology.close()
        opened.pop()
    return outcome


def _two_at_once(topology: Topology, *, swapped: bool) -> None:
    parts = [torch.zeros(NUMEL), torch.zeros(2 * NUMEL)]
    outputs = [torch.zeros(topology.world_size * part.numel()) for part in parts]
    order = (1, 0) if swapped else (0, 1)
    works = [zcomm.all_gather_single(outputs[k], parts[k], group=topology, async_op=True) for k in order]
    failures = list[DivergedError]()
    for work in works:
        assert work is not None
        try:
            work.wait()
        except DivergedError as error:
            failures.append(error)
    if failures:
        raise failures[0]


OTHER_CALLS: tuple[Callable[[Topology], object], ...] = (
    lambda topology: control.gather_float64(torch.zeros(3, dtype=torch.float64), topology),
    lambda topology: control.broadcast_(torch.zeros(7), 0, topology),
    lambda topology: _two_at_once(topology, swapped=False),
    lambda topology: zcomm.all_reduce(torch.zeros(4096), group=topology, format="int8"),
)
"""None of which is in CALLS."""


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
    except zcomm.DamagedError:
        raise
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


def _gather(world_size: int, rank: int, topology: Any) -> list[float]:
    output = torch.zeros(world_size * NUMEL)
    zcomm.all_gather_single(output, torch.full((NUMEL,), rank + 1.0), group=topology, format="int8")
    return _one_of_each(output, world_size)


def _asynchronous(world_size: int, rank: int, topology: Any) -> list[float]:
    """Collectives of two hops run in a thread; what is called meanwhile comes after them."""
    output, total = torch.zeros(world_size * NUMEL), torch.full((world_size * NUMEL,), rank + 1.0)
    works = [
        zcomm.all_gather_single(output, torch.full((NUMEL,), rank + 1.0), group=topology, async_op=True),
        zcomm.all_reduce(total, group=topology, format="int8", async_op=True),
    ]
    control.any_(torch.tensor(rank == 0), topology)
    for work in reversed(works):
        assert work is not None
        work.wait()
    return _one_of_each(output, world_size) + _one_of_each(total, world_size)[:1]


def _one_of_each(output: torch.Tensor, world_size: int) -> list[float]:
    """The value of each rank's part, all of whose elements must be equal but for the rounding of int8."""
    rows = output.view(world_size, -1)
    low, high = rows.amin(1), rows.amax(1)
    return [round(value, 1) for value in low.tolist()] if bool((high - low < 0.05).all()) else rows.unique().tolist()


def _part(world_size: int, rank: int, _: Any) -> bool:
    """A topology of some of the ranks; the second one is in a group more than the others."""
    own = dist.new_group([rank], use_local_synchronization=True) if rank == 1 else None
    with failing("making a group", None):
        group = dist.new_group(list(range(max(2, world_size - 1))))
    found = True
    if rank < max(2, world_size - 1):
        topology = Topology(ranks_per_node=1, group=group)
        found = control.any_(torch.tensor(rank == 1), topology).item()
        topology.close()
        dist.destroy_process_group(group)
    if own is not None:
        dist.destroy_process_group(own)
    return found


def _exit(world_size: int, rank: int, topology: Any) -> list[float]:
    """The process is about to end, and an exit handler of the program calls collectives."""
    end_daemons()
    return _asynchronous(world_size, rank, topology)


CALLS: dict[str, Callable[[int, int, Any], Any]] = {
    "companion": lambda _, rank, topology: control.any_(torch.tensor(rank == 1), topology.companion).item(),
    "background": _background,
    "agree": lambda _, rank, topology: on_every_rank(lambda: rank, topology),
    "one fails": _one_fails,
    "any": lambda _, rank, topology: control.any_(torch.tensor(rank == 0), topology).item(),
    "texts": _texts,
    "ints": lambda _, rank, __: gather_ints(rank, None),
    "broadcast": _broadcast,
    "gather": _gather,
    "async": _asynchronous,
    "part": _part,
    "exit": _exit,
}
EXPECTED: dict[str, Callable[[int, int], Any]] = {
    "companion": lambda _, __: True,
    "background": lambda world_size, _: list(range(world_size)),
    "agree": lambda _, rank: rank,
    "one fails": lambda world_size, rank: "Alone" if rank == world_size - 1 else "StateError",
    "any": lambda _, __: True,
    "texts": lambda world_size, _: [f"from {rank}" for rank in range(world_size)],
    "ints": lambda world_size, _: list(range(world_size)),
    "broadcast": lambda world_size, _: [world_size - 1.0] * 5,
    "gather": lambda world_size, _: [rank + 1.0 for rank in range(world_size)],
    "async": lambda world_size, _: [*(rank + 1.0 for rank in range(world_size)), world_size * (world_size + 1) / 2],
    "part": lambda _, __: True,
}
EXPECTED["exit"] = EXPECTED["async"]
NEED_TOPOLOGY = ("companion", "background", "agree", "one fails", "any", "broadcast", "gather", "async", "exit")
OPERATIONS = ("topology", "close", "reopen", *(call for call in CALLS if call != "exit"))


def draw(seed: int) -> Scenario:
    """The scenario of ``seed``."""
    rng = random.Random(f"protocols {seed}")
    world_size = rng.choice((2, 3, 4))
    calls = tuple(rng.choice(OPERATIONS) for _ in range(rng.randint(2, 5))) + ("exit",) * (rng.random() < 0.1)
    scenario = Scenario("protocols", seed, world_size, 1 if world_size == 3 else rng.choice((1, 2)), calls)
    kind = rng.choice(("", *FAULTS))
    if not kind:
        return scenario
    if kind in ALONE_FAULTS:
        watched = [number for number, call in enumerate(calls) if call in NEED_TOPOLOGY and call != "exit"]
        return scenario.with_fault(kind, rng.randrange(world_size), rng.choice(watched)) if watched else scenario
    at = rng.randrange(len(calls) + 1) if kind in AT_CALL else rng.randrange(NUM_EVENTS * len(calls))
    return scenario.with_fault(kind, rng.randrange(world_size), at)
