"""The flight recorder: the last 64 exchanges that this rank has started over each hop of a topology, for a dump.

It is always on: the ledgers of the hops remember them anyway, for :mod:`zcomm.watch`, which names the ranks that lag
when it finds ranks that wait for one another.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch.distributed as dist

from zcomm.topology import Topology

__all__ = ["Flight", "flight_record"]


class Flight(NamedTuple):
    """One exchange, as this rank has seen it."""

    ranks: tuple[int, ...]
    """Of torch.distributed, over which it runs."""
    number: int
    """Of the exchanges over these ranks, from 1; the same on each of them."""
    operation: str
    nbytes: int
    """Of the tensor that this rank gave."""
    state: str
    """"started", "waited for" or "ended", as far as this rank has asked."""
    age_s: float
    """Seconds since it was started."""


def flight_record(topology: Topology) -> list[Flight]:
    """The last 64 exchanges of each hop of ``topology``, oldest first. Not collective: any thread may call it."""
    now, seen, flights = time.monotonic(), set[int](), list[Flight]()
    for hop in (topology.world, topology.intra, topology.inter, topology.__dict__.get("on_host")):
        if hop is None or hop.group is None or id(hop.ledger) in seen:
            continue
        ledger, ranks = hop.ledger, tuple(dist.get_process_group_ranks(hop.group))
        seen.add(id(ledger))
        calls, times = list(ledger.recent), list(ledger.times)
        first, waited = ledger.num_started - len(calls) + 1, set(ledger.waits.values())
        for number, (call, begun) in enumerate(zip(calls, times, strict=False), first):
            state = "waited for" if number in waited else "ended" if number in ledger.ended else "started"
            flights.append(Flight(ranks, number, call.operation, call.nbytes, state, now - begun))
    return sorted(flights, key=lambda flight: -flight.age_s)
