"""Communicators over NCCL: one for the hops of a route, created by all its ranks at the first use.

The first rank of a hop creates NCCL's unique id and publishes it in the process group's store. So neither a collective
nor a communicator of torch's is needed.

Lifetime: a communicator over the hops of a Topology is freed when the Topology is closed or collected, one over a
caller's process group with the group. A communicator over a Topology on which a deadlock is found
(:mod:`zcomm._transport.deadlock_watch`) is aborted, and created anew at its next use.

:func:`over_nccl` gives hops that exchange ready bytes over a communicator, for operations for which the pipeline in C++
has no kernels. The collective is the same as over torch's groups, with the same kernels, messages and bits; only its
exchanges use NCCL. Each hop has its own stream, so the hops of several chunks overlap each other and the kernels.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zcomm._base.pending import Pending
from zcomm._base.rank_context import clock
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.backend import Hop
from zcomm._transport.backend_choice import nccl_unavailable_reason
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog, call_here, failing
from zcomm._transport.device_streams import DeviceStreams, QueuedOnStream, device_streams, on_device
from zcomm._transport.nccl_library import is_emulated, nccl_library
from zcomm._transport.store_exchange import prefix_of_start
from zcomm._transport.tagged_group import Group, ranks_of
from zcomm.errors import BackendUnavailableError, CommunicationError, StateError

PREFIX = "zcomm-nccl"
ALONE = "alone"
ID_PREFIX = b"id:"
CREATION = "the making of a communicator over NCCL"
IN_ROUTE = " / "
SKIPPED = CollectiveCall("nothing", 0, "cpu")
MIN_POLL_S, MAX_POLL_S = 0.0005, 0.02

Names = tuple[str, ...]
"""Group names of a route's hops."""
Key = tuple[int, Names]
"""Device index, and the hops."""


class Communicator(NamedTuple):
    native: Any
    """The C++ ``NcclCommunicator``."""
    streams: DeviceStreams


class Stream(NamedTuple):
    """A stream of the communicators over one route, for the deadlock watch."""

    name: str
    """The same on all its ranks. The part before :data:`IN_ROUTE` names the route, on all ranks of the route."""
    queued: QueuedOnStream
    abort: Callable[[str], None]
    """Aborts the work in flight over the route, with a reason; the next use creates another communicator."""


class Communicators(dict[Key, Communicator]):
    """The communicators over the hops of a Topology of ``ranks``, or over one process group; ``clear()`` frees them."""

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._ranks = ranks
        self.queued: dict[Names, tuple[QueuedOnStream, ...]] = {}
        """By route, the logs of its calls and of the exchanges of each hop. They outlive an aborted communicator."""
        self._world_name = ""
        self._skipped: dict[str, int] = {}
        self._aborted: list[Communicator] = []
        """Freed in :meth:`clear`, not when aborted: freeing waits for all work of the process, some of which may still
        wait for other ranks."""

    def queued_over(self, hops: Sequence[Hop]) -> tuple[QueuedOnStream, ...]:
        """The logs of the route of ``hops``."""
        names = _names_of(hops)
        if names not in self.queued:
            of_hops = [() if hop.group is None else tuple(ranks_of(hop.group)) for hop in hops]
            several = [ranks for ranks in of_hops if ranks]
            route_ranks = several[0] if len(several) == 1 else self._ranks
            self.queued[names] = tuple(
                QueuedOnStream(_log_of(hops), ranks, bool(self._ranks)) for ranks in (route_ranks, *of_hops)
            )
            for stream in self.streams(self._world_name):
                for _ in range(self._skipped.pop(stream.name, 0)):
                    stream.queued.log.start(SKIPPED)
        return self.queued[names]

    def skip(self, world_name: str, numbers: Mapping[str, int]) -> None:
        """Give streams that this rank has not used yet, by name, the number that they have on the other ranks."""
        self._world_name = world_name
        self._skipped.update(numbers)

    def streams(self, world_name: str) -> Iterator[Stream]:
        """The streams used so far. ``world_name`` is the name of the group of all ranks."""
        for names, (calls, *of_hops) in list(self.queued.items()):
            groups = [name for name in names if name != ALONE]
            route = f"nccl {len(groups)} {groups[0] if len(groups) == 1 else world_name}"
            for name, queued in zip(("calls", *names), (calls, *of_hops), strict=True):
                if queued.ranks:
                    yield Stream(f"{route}{IN_ROUTE}{name}", queued, partial(self.abort, names))

    def abort(self, names: Names, reason: str) -> None:
        """Abort the communicators of the route ``names``."""
        for key in [key for key in self if key[1] == names]:
            self._aborted.append(self.pop(key))
            self._aborted[-1].native.abort(reason)

    def clear(self) -> None:
        """Finish the work in flight and free all communicators."""
        for made in (*self.values(), *self._aborted):
            made.native.close()
        super().clear()
        self._aborted.clear()


def _log_of(hops: Sequence[Hop]) -> CollectiveLog:
    log = CollectiveLog()
    for hop in hops:
        if hop.group is not None:
            log.departed = hop.log.departed
    return log


class CommunicatorCreation(NamedTuple):
    """The creation of a communicator, logged under the same number on all its ranks."""

    queued: QueuedOnStream
    number: int
    place: str
    """Key prefix in the store of a hop's group."""

    def read(self, store: Any, key: str) -> bytes:
        """The value of ``key`` once a rank has set it. Polls: a blocking get() would not see the watch's verdict."""
        end, pause_s = clock().monotonic() + store.timeout.total_seconds(), MIN_POLL_S
        while not store.check([key]):
            if self.number <= self.queued.log.last_broken:
                raise CommunicationError(f"{CREATION} was aborted")
            if clock().monotonic() > end:
                raise dist.DistStoreError(f"no rank has set {key!r} within {store.timeout.total_seconds():g} s")
            clock().sleep(pause_s)
            pause_s = min(1.5 * pause_s, MAX_POLL_S)
        return bytes(store.get(key))


_OF_GROUPS: WeakKeyDictionary[Group, Communicators] = WeakKeyDictionary()
"""Communicators of calls over a caller's process group."""
_ALONE = Communicators()
"""Communicators of a single process without torch.distributed."""


def intra_first(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """The hops of a route in a communicator's order: intra-node first, whichever hop the collective starts with."""
    return tuple(sorted(hops, key=lambda hop: hop.num_inter_peers > 0))


def communicator_over(hops: Sequence[Hop], device: torch.device) -> Communicator:
    """The communicator over ``hops``, which are in :func:`intra_first` order. The first use is collective over them.

    Raises:
        BackendUnavailableError: NCCL is unavailable on a rank. The same on every rank.
        StateError: The first use is inside a graph capture.
        CommunicationError: The ranks could not connect; with NCCL's message.
    """
    made, key = _owner_of(hops), _key_of(hops, device)
    if key not in made:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a communicator over NCCL cannot be created during a graph capture: make such a call over the same "
                "ranks before the capture"
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


def start_creation(hops: Sequence[Hop], device: torch.device) -> CommunicatorCreation:
    """Log the creation of a communicator over ``hops``. All its ranks call it; it waits for none of them."""
    queued, *_ = _owner_of(hops).queued_over(hops)
    number = queued.log.start(call_here(CREATION, 0, device.type))
    route = "-".join("alone" if hop.group is None else str(hop.size) for hop in hops)  # a group may be in several
    return CommunicatorCreation(queued, number, f"{route}/{number}")


def _make(hops: Sequence[Hop], device: torch.device) -> Communicator:
    creation = start_creation(hops, device)
    with creation.queued.log.waiting(creation.number, creation.queued.ranks):
        agree_on_nccl(*hops, creation=creation)
        ids = [_unique_id(hop, creation) for hop in hops]
        timeouts = [backend.timeout_of(hop.group) for hop in hops if hop.group is not None]
        timeout_s = min((t.total_seconds() for t in timeouts if t is not None), default=600.0)
        members = [(unique_id, hop.size, hop.rank) for unique_id, hop in zip(ids, hops, strict=True)]
        try:
            with on_device(device):
                native = kernels.native().NcclCommunicator(nccl_library(), device.index or 0, members, timeout_s)
        except RuntimeError as error:
            raise CommunicationError(f"creating a communicator over NCCL failed: {error}") from error
    return Communicator(native, device_streams(native, _owner_of(hops).queued_over(hops)))


def _store(hop: Hop, round_: str, creation: CommunicatorCreation) -> Any:
    assert hop.group is not None, "a rank alone exchanges nothing"
    store, ranks = hop.group.get_group_store(), ranks_of(hop.group)
    prefix = f"{PREFIX}/{round_}/{creation.place}"
    prefix = prefix_of_start(store, prefix, ranks, ranks[hop.rank], backend.timeout_of(hop.group))
    return distributed_c10d.PrefixStore(prefix, store)


def agree_on_nccl(*hops: Hop, creation: CommunicatorCreation | None = None) -> None:
    """Raise BackendUnavailableError on every rank of ``hops``, one route, unless NCCL is available on all of them.

    Each hop forwards what was reported on the hop before. After the last one, every rank knows the reasons of all.
    """
    creation = start_creation(hops, torch.device("cpu")) if creation is None else creation
    reason = nccl_unavailable_reason()
    reasons = {dist.get_rank() if dist.is_initialized() else 0: reason} if reason else {}
    for hop in hops:
        if hop.group is None:
            continue
        store = _store(hop, "sound", creation)
        store.set(str(hop.rank), json.dumps(sorted(reasons.items())))
        with failing(CREATION, hop.group):
            texts = [creation.read(store, str(rank)) for rank in range(hop.size)]
        reasons = {rank: text for of_rank in texts for rank, text in json.loads(of_rank)}
    lines = [f"  rank {rank}: {text}" for rank, text in sorted(reasons.items())]
    if lines:
        raise BackendUnavailableError("backend='nccl' cannot be used:\n" + "\n".join(lines))


def _unique_id(hop: Hop, creation: CommunicatorCreation | None = None) -> bytes:
    if hop.group is None:
        return b""
    creation = start_creation((hop,), torch.device("cpu")) if creation is None else creation
    store = _store(hop, "id", creation)
    if hop.rank == 0:
        try:
            published = ID_PREFIX + kernels.native().nccl_unique_id(nccl_library())
        except RuntimeError as error:  # published too: the other ranks would wait until the timeout
            published = str(error).encode()
        store.set("id", published)
    with failing(CREATION, hop.group):
        value = creation.read(store, "id")
    if not value.startswith(ID_PREFIX):
        raise CommunicationError(f"creating a communicator over NCCL failed on its first rank: {value.decode()}")
    return value[len(ID_PREFIX) :]


def close_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Finish the work in flight over a caller's ``group``, or over all of them, and free their communicators.

    May be called repeatedly. Those of Topologies are not affected.
    """
    owners = [*_OF_GROUPS.values(), _ALONE] if group is None else [_OF_GROUPS.get(group, Communicators())]
    for owner in owners:  # its logs stay, so that a later communicator does not reuse a number and its key in the store
        owner.clear()


atexit.register(close_communicators)


def over_nccl(*hops: Hop) -> tuple[Hop, ...]:
    """The hops of one route, in any order, with exchanges over the communicator of all of them."""
    ordered = intra_first(hops)
    return tuple(replace(hop, nccl=_NcclBytes(ordered, ordered.index(hop))) for hop in hops)


def check_device(operation: str, device: torch.device) -> None:
    """Raise BackendUnavailableError unless NCCL supports tensors on ``device``: CUDA, or the CPU if emulated."""
    taken = "cpu" if is_emulated() else "cuda"
    if device.type != taken:
        raise BackendUnavailableError(
            f"backend='nccl' does not serve this {operation}: it takes {taken.upper()} tensors, got device={device}; "
            "use backend='torch'"
        )


class _NcclBytes:
    """Hop number ``index`` of ``hops``, in :func:`intra_first` order: a :class:`zcomm._transport.backend.NcclHop`."""

    def __init__(self, hops: tuple[Hop, ...], index: int) -> None:
        self._hops, self._index = hops, index

    def all_gather(self, output: Tensor, message: Tensor) -> Pending:
        """``message`` is contiguous; ``output`` is contiguous or has contiguous rows."""
        stride = message.nbytes if output.is_contiguous() else output.stride(0) * output.element_size()
        return self._exchange(output, message, stride, message.nbytes, is_gather=True)

    def all_to_all(self, output: Tensor, messages: Tensor) -> Pending:
        nbytes = messages.nbytes // self._hops[self._index].size
        return self._exchange(output, messages, nbytes, nbytes, is_gather=False)

    def _exchange(self, output: Tensor, source: Tensor, stride: int, nbytes: int, *, is_gather: bool) -> Pending:
        check_device("exchange", source.device)
        over = communicator_over(self._hops, source.device)
        call = call_here("all_gather" if is_gather else "all_to_all", source.nbytes, source.device.type)
        with over.streams.on_side(self._index, source.device, (output, source), call) as stream:
            place = stride, nbytes, stream.address
            try:
                over.native.exchange_bytes(self._index, is_gather, source.data_ptr(), output.data_ptr(), *place)
            except RuntimeError as error:
                raise CommunicationError(f"an exchange of bytes over NCCL failed: {error}") from error
            return stream.completion()
