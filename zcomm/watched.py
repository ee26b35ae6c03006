"""What a :class:`zcomm.watch.Watch` looks at: hops of topologies, and streams of communicators over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist

from zcomm import backend
from zcomm.backend import ALONE, Hop
from zcomm.ledger import Ledger
from zcomm.nccl_communicators import IN_ROUTE, Communicators
from zcomm.pending import Pending
from zcomm.tagged import tag_of
from zcomm.verdict import Owed
from zcomm.work import WorkQueue

__all__ = ["Watchable", "Watched", "abort_unequal", "complete", "hops_of", "name_of", "skip", "watched_of"]


class Watchable(Protocol):
    """A :class:`zcomm.Topology`."""

    world: Hop
    intra: Hop
    inter: Hop
    queue: WorkQueue
    rank: int

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of torch.distributed, in order."""


class Watched(NamedTuple):
    """A hop of one topology, or what it has queued on a stream of a communicator over NCCL."""

    kind: str
    ledger: Ledger
    global_ranks: Sequence[int]
    sends: bool
    """Whether exchanges of different calls never meet, or never end."""
    hop: Hop = ALONE
    """Alone: it is a communicator's, which ``abort`` ends."""
    beside: Hop = ALONE
    """The other hop of a collective of two, if there is one."""
    abort: Callable[[str], None] | None = None


def abort_unequal(watched: Mapping[str, Watched], owed: Mapping[str, Owed], reason: str) -> None:
    """Abort the communicators of routes over which not all ranks have queued the same: on all ranks of each."""
    routes = {name.partition(IN_ROUTE)[0] for name, of_hop in owed.items() if of_hop.calls}
    for name, one in watched.items():
        if one.abort is not None and name.partition(IN_ROUTE)[0] in routes:
            one.abort(reason)


def complete(watched: Watched, owed: Owed) -> list[Pending]:
    """Start what this rank owes over one hop, and bring its numbers to where the others' will be."""
    hop, ledger, works = watched.hop, watched.ledger, []
    num_started, _, recent, _ = ledger.account()
    mine = {num_started - back: call for back, call in enumerate(reversed(recent))}
    for number, call in owed.calls:
        own = mine.get(number)
        is_mine = own is not None and (not hop.sends(call.device_type) or tag_of(number, own) == tag_of(number, call))
        while ledger.num_started < number:
            ledger.start(call)
        if not is_mine and watched.abort is None:
            works.append(backend.take_part(number, call, hop.next_to(watched.beside) if call.beside else hop))
    ledger.num_beside = max(ledger.num_beside, owed.num_beside)
    return works


def watched_of(topology: Watchable) -> Iterator[tuple[str, Watched]]:
    """All that ``topology`` exchanges over, by names that are the same on all ranks of each."""
    for watched in hops_of(topology):
        yield _name_of(watched.hop), watched
    communicators: Communicators | None = topology.world.communicators
    for stream in () if communicators is None else communicators.streams(name_of(topology)):
        yield stream.name, Watched(stream.name, stream.queued.ledger, stream.queued.ranks, True, abort=stream.abort)


def skip(topology: Watchable, numbers: Mapping[str, int]) -> None:
    """Nobody will use what was queued up to ``numbers`` on streams, by name, on which this rank has queued nothing."""
    communicators: Communicators | None = topology.world.communicators
    if communicators is not None:
        communicators.skip(name_of(topology), numbers)


def hops_of(topology: Watchable) -> Iterator[Watched]:
    """The hops of ``topology`` that have several ranks."""
    t, seen = topology, set[int]()
    of_host: Hop = vars(t).get("on_host", ALONE)
    pairs = (("", t.world, ALONE), ("intra", t.intra, t.inter), ("inter", t.inter, t.intra), ("host", of_host, ALONE))
    for kind, hop, beside in pairs:
        if hop.group is not None and id(hop.ledger) not in seen:
            seen.add(id(hop.ledger))
            ranks = dist.get_process_group_ranks(hop.group)
            yield Watched(f"{name_of(t)}.{kind}", hop.ledger, ranks, hop.sends("cpu"), hop, beside)


def name_of(topology: Watchable) -> str:
    """The same on all its ranks."""
    return _name_of(topology.world)


def _name_of(hop: Hop) -> str:
    """The same on all its ranks."""
    return "" if hop.group is None else str(hop.group.group_name)
