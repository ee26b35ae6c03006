"""Communicators over NCCL: one for the hops of a route, made at the first use by all its ranks together.

The first rank of a hop makes NCCL's unique id; it travels through the process group's own store. So no exchange of
torch's, and no communicator of torch's, is needed.

They end with what they were made for: those over the hops of a Topology when that is closed or collected, those over a
process group that a call was given with the group. Ranks that wait for one another in one over a Topology are found out
(:mod:`zcomm.watch`): it is aborted then, and made anew when it is next used.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zcomm import backend, kernels
from zcomm.backend import Hop
from zcomm.carrier import nccl_unavailable_reason
from zcomm.device_streams import DeviceStreams, Queued, device_streams, on_device
from zcomm.errors import BackendUnavailableError, CommunicationError, StateError
from zcomm.ledger import Call, Ledger, call_here, failing
from zcomm.nccl_library import nccl_library
from zcomm.starts import prefix_of_start

__all__ = [
    "Communicator",
    "Communicators",
    "Making",
    "agree_on_nccl",
    "begin_making",
    "close_communicators",
    "communicator_over",
    "inside_first",
]

PREFIX = "zcomm-nccl"
ALONE = "alone"
MADE = b"id:"
MAKING = "the making of a communicator over NCCL"
IN_ROUTE = " / "
SKIPPED = Call("nothing", 0, "cpu")
FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.02

Names = tuple[str, ...]
"""Of the groups of a route's hops."""
Key = tuple[int, Names]
"""Device, and the hops."""


class Communicator(NamedTuple):
    """One communicator of this process."""

    native: Any
    """The ``NcclCommunicator``."""
    streams: DeviceStreams
    """What it works on."""


class Stream(NamedTuple):
    """A stream of the communicators over one route."""

    name: str
    """The same on all its ranks; up to :data:`IN_ROUTE` that of the route, the same on all of the route's."""
    queued: Queued
    abort: Callable[[str], None]
    """Ends what is under way over the route, with that reason; the next use makes another communicator."""


class Communicators(dict[Key, Communicator]):
    """The communicators over the hops of a Topology of ``ranks``, or over one process group; ``clear()`` frees them."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._ranks = ranks
        self.queued: dict[Names, tuple[Queued, ...]] = {}
        """Over each route, whatever communicators there were: calls, and the exchanges of each hop."""
        self._whole = ""
        self._skipped: dict[str, int] = {}
        self._aborted: list[Communicator] = []
        """Freed with the others: that waits for all work of the process, of which there is some still."""

    def queued_over(self, hops: Sequence[Hop]) -> tuple[Queued, ...]:
        """What was queued over the route of ``hops``."""
        names = _names_of(hops)
        if names not in self.queued:
            of_hops = [() if hop.group is None else tuple(dist.get_process_group_ranks(hop.group)) for hop in hops]
            several = [ranks for ranks in of_hops if ranks]
            whole = several[0] if len(several) == 1 else self._ranks
            self.queued[names] = tuple(Queued(_ledger_of(hops), r, bool(self._ranks)) for r in (whole, *of_hops))
            for stream in self.streams(self._whole):
                for _ in range(self._skipped.pop(stream.name, 0)):
                    stream.queued.ledger.start(SKIPPED)
        return self.queued[names]

    def skip(self, whole: str, numbers: Mapping[str, int]) -> None:
        """What was queued up to ``numbers`` counts for nothing, by the name of streams that this rank has not used."""
        self._whole = whole
        self._skipped.update(numbers)

    def streams(self, whole: str) -> Iterator[Stream]:
        """What the ranks have begun to queue; ``whole``: the name of all ranks' group."""
        for names, (calls, *of_hops) in list(self.queued.items()):
            groups = [name for name in names if name != ALONE]
            route = f"nccl {len(groups)} {groups[0] if len(groups) == 1 else whole}"
            for name, queued in zip(("calls", *names), (calls, *of_hops), strict=True):
                if queued.ranks:
                    yield Stream(f"{route}{IN_ROUTE}{name}", queued, partial(self.abort, names))

    def abort(self, names: Names, reason: str) -> None:
        """:attr:`Stream.abort` of that route."""
        for key in [key for key in self if key[1] == names]:
            self._aborted.append(self.pop(key))
            self._aborted[-1].native.abort(reason)

    def clear(self) -> None:
        """Finish what is under way, and free all of them."""
        for made in (*self.values(), *self._aborted):
            made.native.close()
        super().clear()
        self._aborted.clear()


def _ledger_of(hops: Sequence[Hop]) -> Ledger:
    ledger = Ledger()
    for hop in hops:
        if hop.group is not None:
            ledger.lost = hop.ledger.lost
    return ledger


class Making(NamedTuple):
    """The making of a communicator, which all its ranks begin as the same number."""

    queued: Queued
    number: int
    place: str
    """In the store of a hop's group."""

    def read(self, store: Any, key: str) -> bytes:
        """What a rank says under ``key``; a verdict of the watch ends the wait."""
        end, pause_s = time.monotonic() + store.timeout.total_seconds(), FIRST_LOOK_S
        while not store.check([key]):
            if self.number <= self.queued.ledger.last_broken:
                raise CommunicationError(f"{MAKING} was given up")
            if time.monotonic() > end:
                raise dist.DistStoreError(f"no rank has said {key!r} within {store.timeout.total_seconds():g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        return bytes(store.get(key))


_OF_GROUPS: WeakKeyDictionary[dist.ProcessGroup, Communicators] = WeakKeyDictionary()
"""Of calls over a process group, which has no other owner here."""
_ALONE = Communicators()
"""Of calls of one process without torch.distributed."""


def inside_first(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """The hops of a route as a communicator has them: a gather begins between nodes."""
    return tuple(sorted(hops, key=lambda hop: hop.num_inter_peers > 0))


def communicator_over(hops: Sequence[Hop], device: torch.device) -> Communicator:
    """The communicator over ``hops``, inside the node first; at the first use collective over them.

    Raises:
        BackendUnavailableError: A rank has no NCCL. The same on every rank.
        StateError: The first use is in a capture.
        CommunicationError: The ranks did not find one another, with NCCL's text.
    """
    made, key = _owner_of(hops), _key_of(hops, device)
    if key not in made:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a communicator over NCCL cannot be made while a graph is captured: make such a call, over the same "
                "ranks, before the capture"
            )
        made[key] = _make(hops, device)
    return made[key]


def _owner_of(hops: Sequence[Hop]) -> Communicators:
    owner: Communicators | None = next((hop.communicators for hop in hops if hop.communicators is not None), None)
    if owner is not None:
        return owner
    groups = [hop.group for hop in hops if hop.group is not None]
    return _OF_GROUPS.setdefault(groups[0], Communicators()) if groups else _ALONE


def _key_of(hops: Sequence[Hop], device: torch.device) -> Key:
    return device.index or 0, _names_of(hops)


def _names_of(hops: Sequence[Hop]) -> Names:
    return tuple(ALONE if hop.group is None else hop.group.group_name for hop in hops)


def begin_making(hops: Sequence[Hop], device: torch.device) -> Making:
    """Of a communicator over ``hops``. Collective, but it waits for nobody."""
    queued, *_ = _owner_of(hops).queued_over(hops)
    number = queued.ledger.start(call_here(MAKING, 0, device.type))
    route = "-".join("alone" if hop.group is None else str(hop.size) for hop in hops)  # a group may be in several
    return Making(queued, number, f"{route}/{number}")


def _make(hops: Sequence[Hop], device: torch.device) -> Communicator:
    making = begin_making(hops, device)
    with making.queued.ledger.waiting(making.number, making.queued.ranks):
        agree_on_nccl(*hops, making=making)
        ids = [_unique_id(hop, making) for hop in hops]
        timeouts = [backend.timeout_of(hop.group) for hop in hops if hop.group is not None]
        timeout_s = min((t.total_seconds() for t in timeouts if t is not None), default=600.0)
        members = [(unique_id, hop.size, hop.rank) for unique_id, hop in zip(ids, hops, strict=True)]
        try:
            with on_device(device):
                native = kernels.native().NcclCommunicator(nccl_library(), device.index or 0, members, timeout_s)
        except RuntimeError as error:
            raise CommunicationError(f"no communicator over NCCL: {error}") from error
    return Communicator(native, device_streams(native, _owner_of(hops).queued_over(hops)))


def _store(hop: Hop, round_: str, making: Making) -> Any:
    assert hop.group is not None, "one rank has nobody to talk to"
    store, ranks = hop.group.get_group_store(), dist.get_process_group_ranks(hop.group)
    prefix = f"{PREFIX}/{round_}/{making.place}"
    prefix = prefix_of_start(store, prefix, ranks, ranks[hop.rank], backend.timeout_of(hop.group))
    return distributed_c10d.PrefixStore(prefix, store)


def agree_on_nccl(*hops: Hop, making: Making | None = None) -> None:
    """Raise BackendUnavailableError on every rank of ``hops``, of one route, unless all of them can use NCCL.

    Each hop passes on what the one before it has told: after the last, every rank knows of every rank.
    """
    making = begin_making(hops, torch.device("cpu")) if making is None else making
    reason = nccl_unavailable_reason()
    told = {dist.get_rank() if dist.is_initialized() else 0: reason} if reason else {}
    for hop in hops:
        if hop.group is None:
            continue
        store = _store(hop, "sound", making)
        store.set(str(hop.rank), json.dumps(sorted(told.items())))
        with failing(MAKING, hop.group):
            texts = [making.read(store, str(rank)) for rank in range(hop.size)]
        told = {rank: text for of_rank in texts for rank, text in json.loads(of_rank)}
    lines = [f"  rank {rank}: {text}" for rank, text in sorted(told.items())]
    if lines:
        raise BackendUnavailableError("backend='nccl' cannot be used:\n" + "\n".join(lines))


def _unique_id(hop: Hop, making: Making | None = None) -> bytes:
    if hop.group is None:
        return b""
    making = begin_making((hop,), torch.device("cpu")) if making is None else making
    store = _store(hop, "id", making)
    if hop.rank == 0:
        try:
            made = MADE + kernels.native().nccl_unique_id(nccl_library())
        except RuntimeError as error:  # the others wait for it
            made = str(error).encode()
        store.set("id", made)
    with failing(MAKING, hop.group):
        told = making.read(store, "id")
    if not told.startswith(MADE):
        raise CommunicationError(f"no communicator over NCCL: its first rank made no id: {told.decode()}")
    return told[len(MADE) :]


def close_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Finish what is under way over ``group``, or over all that were given to calls, and free the communicators.

    Any number of times. A Topology's are not among them.
    """
    owners = [*_OF_GROUPS.values(), _ALONE] if group is None else [_OF_GROUPS.get(group, Communicators())]
    for owner in owners:  # what it has queued stays: numbers are never used twice
        owner.clear()


atexit.register(close_communicators)
