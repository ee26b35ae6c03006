"""Communicators over NCCL: one for the hops of a route, made at the first use by all its ranks together.

The first rank of a hop makes NCCL's unique id; it travels through the process group's own store. So no exchange of
torch's, and no communicator of torch's, is needed.

They end with what they were made for: those over the hops of a Topology when that is closed or collected, those over a
process group that a call was given with the group. Ranks that wait for one another in one over a Topology are found out
(:mod:`zcomm._transport.deadlock_watch`): it is aborted then, and made anew when it is next used.

Single hops over NCCL, of bytes that are there already: for what the pipeline in C++ has no kernels for.

The collective is the one that runs over torch's groups, with the same kernels, messages and bits; only the exchanges go
through the communicator of :mod:`zcomm._transport.nccl_communicators`. Each hop has a stream of its own, so hops of several chunks
overlap one another and the kernels.
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
from torch import Tensor
from torch.distributed import distributed_c10d

from zcomm._base.pending import Pending
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.backend import Hop
from zcomm._transport.backend_choice import nccl_unavailable_reason
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog, call_here, failing
from zcomm._transport.device_streams import DeviceStreams, QueuedOnStream, device_streams, on_device
from zcomm._transport.nccl_library import is_emulated, nccl_library
from zcomm._transport.store_exchange import prefix_of_start
from zcomm.errors import BackendUnavailableError, CommunicationError, StateError

PREFIX = "zcomm-nccl"
ALONE = "alone"
MADE = b"id:"
MAKING = "the making of a communicator over NCCL"
IN_ROUTE = " / "
SKIPPED = CollectiveCall("nothing", 0, "cpu")
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
    queued: QueuedOnStream
    abort: Callable[[str], None]
    """Ends what is under way over the route, with that reason; the next use makes another communicator."""


class Communicators(dict[Key, Communicator]):
    """The communicators over the hops of a Topology of ``ranks``, or over one process group; ``clear()`` frees them."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._ranks = ranks
        self.queued: dict[Names, tuple[QueuedOnStream, ...]] = {}
        """Over each route, whatever communicators there were: calls, and the exchanges of each hop."""
        self._whole = ""
        self._skipped: dict[str, int] = {}
        self._aborted: list[Communicator] = []
        """Freed with the others: that waits for all work of the process, of which there is some still."""

    def queued_over(self, hops: Sequence[Hop]) -> tuple[QueuedOnStream, ...]:
        """What was queued over the route of ``hops``."""
        names = _names_of(hops)
        if names not in self.queued:
            of_hops = [() if hop.group is None else tuple(dist.get_process_group_ranks(hop.group)) for hop in hops]
            several = [ranks for ranks in of_hops if ranks]
            whole = several[0] if len(several) == 1 else self._ranks
            self.queued[names] = tuple(
                QueuedOnStream(_ledger_of(hops), r, bool(self._ranks)) for r in (whole, *of_hops)
            )
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


def _ledger_of(hops: Sequence[Hop]) -> CollectiveLog:
    ledger = CollectiveLog()
    for hop in hops:
        if hop.group is not None:
            ledger.lost = hop.ledger.lost
    return ledger


class Making(NamedTuple):
    """The making of a communicator, which all its ranks begin as the same number."""

    queued: QueuedOnStream
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


def over_nccl(*hops: Hop) -> tuple[Hop, ...]:
    """The hops of one route, in any order, carried by the communicator over all of them."""
    ordered = inside_first(hops)
    return tuple(_carried(hop, ordered) for hop in hops)


def _carried(hop: Hop, ordered: tuple[Hop, ...]) -> Hop:
    index = next(i for i, other in enumerate(ordered) if other is hop)
    return hop.with_carrier(_NcclBytes(ordered, index))


def check_device(operation: str, device: torch.device) -> None:
    """Raise BackendUnavailableError unless tensors on ``device`` go over NCCL: CUDA's, or, emulated, the CPU's."""
    taken = "cpu" if is_emulated() else "cuda"
    if device.type != taken:
        raise BackendUnavailableError(
            f"backend='nccl' does not serve this {operation}: it takes {taken.upper()} tensors, got device={device}; "
            "use backend='torch'"
        )


class _NcclBytes:
    """Hop number ``index`` of ``hops``, which are ordered: a :class:`zcomm._transport.backend.Carrier`."""

    def __init__(self, hops: tuple[Hop, ...], index: int) -> None:
        self._hops, self._index = hops, index

    def all_gather(self, output: Tensor, message: Tensor) -> Pending:
        """Of contiguous ``message``; ``output`` is contiguous or has contiguous rows."""
        stride = message.nbytes if output.is_contiguous() else output.stride(0) * output.element_size()
        return self._exchange(output, message, stride, message.nbytes, is_gather=True)

    def all_to_all(self, output: Tensor, messages: Tensor) -> Pending:
        """Of contiguous tensors."""
        nbytes = messages.nbytes // self._hops[self._index].size
        return self._exchange(output, messages, nbytes, nbytes, is_gather=False)

    def _exchange(self, output: Tensor, source: Tensor, stride: int, nbytes: int, *, is_gather: bool) -> Pending:
        check_device("exchange", source.device)
        over = communicator_over(self._hops, source.device)
        call = call_here("all_gather" if is_gather else "all_to_all", source.nbytes, source.device.type)
        with over.streams.beside(self._index, source.device, (output, source), call) as lane:
            place = stride, nbytes, lane.address
            try:
                over.native.exchange_bytes(self._index, is_gather, source.data_ptr(), output.data_ptr(), *place)
            except RuntimeError as error:
                raise CommunicationError(f"an exchange of bytes over NCCL: {error}") from error
            return lane.ended()
