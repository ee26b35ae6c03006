"""The flight record: the last 64 exchanges that this rank has started over each hop of a topology.

It is always on and costs nothing more: the collective logs keep these exchanges for the deadlock watch.
"""

from __future__ import annotations

from typing import NamedTuple

from zcomm._base.rank_context import clock
from zcomm._transport.deadlock_watch import hops_of
from zcomm._transport.topology import Topology


class Flight(NamedTuple):
    """One exchange, as seen by this rank."""

    ranks: tuple[int, ...]
    """The global ranks that take part."""
    number: int
    """Counts the exchanges over these ranks from 1; the same on each of them."""
    operation: str
    nbytes: int
    """Bytes of this rank's tensor."""
    state: str
    """"started", "waited for", "ended" or "failed". It changes only when this rank waits for the exchange."""
    age_s: float
    """Seconds since it was started."""
    format: str
    """Format of the messages."""
    bucket: str
    """The bucket of :mod:`zero` that was exchanged; empty for a caller's own collectives."""


def flight_record(topology: Topology) -> list[Flight]:
    """The last 64 exchanges of each hop of ``topology``, oldest first. Not collective; thread-safe."""
    now = clock().time()
    flights = [
        Flight(
            tuple(watched.global_ranks), entry.number, entry.call.operation, entry.call.nbytes, entry.state,
            now - entry.started_at, entry.format, entry.bucket,
        )
        for watched in hops_of(topology)
        for entry in watched.log.entries()
    ]  # fmt: skip
    return sorted(flights, key=lambda flight: -flight.age_s)
