"""The flight recorder: the last 64 exchanges that this rank has started over each hop of a topology, for a dump.

It is always on: the ledgers of the hops remember them anyway, for :mod:`zcomm._transport.deadlock_watch`, which names the ranks that lag
when it finds ranks that wait for one another.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from zcomm._transport.deadlock_watch import hops_of
from zcomm._transport.topology import Topology


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
    """"started", "waited for", "ended" or "failed", as far as this rank has asked."""
    age_s: float
    """Seconds since it was started."""
    format: str
    """Of the messages."""
    bucket: str
    """Of zero: what it was for; empty for a caller's own collectives."""


def flight_record(topology: Topology) -> list[Flight]:
    """The last 64 exchanges of each hop of ``topology``, oldest first. Not collective: any thread may call it."""
    now = time.time()
    flights = [
        Flight(
            tuple(watched.global_ranks), entry.number, entry.call.operation, entry.call.nbytes, entry.state,
            now - entry.begun, entry.format, entry.bucket,
        )
        for watched in hops_of(topology)
        for entry in watched.ledger.entries()
    ]  # fmt: skip
    return sorted(flights, key=lambda flight: -flight.age_s)
