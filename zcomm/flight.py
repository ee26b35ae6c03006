"""The flight recorder: the last 64 exchanges that this rank has started over each hop of a topology, for a dump.

It is always on: the ledgers of the hops remember them anyway, for :mod:`zcomm.watch`, which names the ranks that lag
when it finds ranks that wait for one another. With ZCOMM_FLIGHT they are in files, too, which outlive the ranks and are
compared when an exchange fails (:mod:`zcomm.flight_files`).
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
    """"started", "waited for", "ended" or "failed", as far as this rank has asked."""
    age_s: float
    """Seconds since it was started."""
    format: str
    """Of the messages."""
    bucket: str
    """Of zero: what it was for; empty for a caller's own collectives."""


def flight_record(topology: Topology) -> list[Flight]:
    """The last 64 exchanges of each hop of ``topology``, oldest first. Not collective: any thread may call it."""
    now, seen, flights = time.time(), set[int](), list[Flight]()
    for hop in (topology.world, topology.intra, topology.inter, topology.__dict__.get("on_host")):
        if hop is None or hop.group is None or id(hop.ledger) in seen:
            continue
        ranks = tuple(dist.get_process_group_ranks(hop.group))
        seen.add(id(hop.ledger))
        for entry in hop.ledger.entries():
            call, age_s = entry.call, now - entry.begun
            flights.append(
                Flight(ranks, entry.number, call.operation, call.nbytes, entry.state, age_s, entry.format, entry.bucket)
            )
    return sorted(flights, key=lambda flight: -flight.age_s)
