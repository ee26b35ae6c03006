"""Communicators over NCCL: one for the hops of a route, made at the first use by all its ranks together.

The first rank of a hop makes NCCL's unique id; it travels through the process group's own store. So no exchange of
torch's, and no communicator of torch's, is needed.

They end with what they were made for: those over the hops of a Topology when that is closed or collected, those over a
process group that a call was given with the group.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zcomm import backend, kernels
from zcomm.backend import Hop
from zcomm.carrier import nccl_unavailable_reason
from zcomm.device_streams import DeviceStreams, device_streams, on_device
from zcomm.errors import BackendUnavailableError, CommunicationError, StateError
from zcomm.ledger import failing
from zcomm.nccl_library import nccl_library
from zcomm.starts import prefix_of_start

__all__ = [
    "Communicator",
    "Communicators",
    "agree_on_nccl",
    "close_communicators",
    "communicator_over",
    "inside_first",
]

PREFIX = "zcomm-nccl"
ALONE = "alone"
MADE = b"id:"
MAKING = "the making of a communicator over NCCL"

Key = tuple[int, tuple[str, ...]]
"""Device, and the hops by the names of their groups."""


class Communicator(NamedTuple):
    """One communicator of this process."""

    native: Any
    """The ``NcclCommunicator``."""
    streams: DeviceStreams
    """What it works on."""


class Communicators(dict[Key, Communicator]):
    """The communicators over one Topology's hops, or over one process group; ``clear()`` frees them."""


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
    owner = next((hop.communicators for hop in hops if hop.communicators is not None), None)
    groups = [hop.group for hop in hops if hop.group is not None]
    if owner is None:
        owner = _OF_GROUPS.setdefault(groups[0], Communicators()) if groups else _ALONE
    made: Communicators = owner
    key = device.index or 0, tuple(ALONE if hop.group is None else hop.group.group_name for hop in hops)
    if key not in made:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                "a communicator over NCCL cannot be made while a graph is captured: make such a call, over the same "
                "ranks, before the capture"
            )
        made[key] = _make(hops, device)
    return made[key]


def _make(hops: Sequence[Hop], device: torch.device) -> Communicator:
    agree_on_nccl(*hops)
    ids = [_unique_id(hop) for hop in hops]
    timeouts = [backend.timeout_of(hop.group) for hop in hops if hop.group is not None]
    timeout_s = min((t.total_seconds() for t in timeouts if t is not None), default=600.0)
    members = [(unique_id, hop.size, hop.rank) for unique_id, hop in zip(ids, hops, strict=True)]
    try:
        with on_device(device):
            native = kernels.native().NcclCommunicator(nccl_library(), device.index or 0, members, timeout_s)
    except RuntimeError as error:
        raise CommunicationError(f"no communicator over NCCL: {error}") from error
    return Communicator(native, device_streams(native, len(hops)))


def _store(hop: Hop, round_: str) -> Any:
    assert hop.group is not None, "one rank has nobody to talk to"
    store, prefix = hop.group.get_group_store(), f"{PREFIX}/{round_}/{_rounds(hop, round_)}"
    ranks = dist.get_process_group_ranks(hop.group)
    prefix = prefix_of_start(store, prefix, ranks, ranks[hop.rank], backend.timeout_of(hop.group))
    return distributed_c10d.PrefixStore(prefix, store)


def _rounds(hop: Hop, round_: str) -> int:
    """How often this rank has done this over the group before: every rank as often."""
    assert hop.group is not None, "one rank has nobody to talk to"
    counts = _ROUNDS.setdefault(hop.group, {})
    counts[round_] = counts.get(round_, 0) + 1
    return counts[round_]


_ROUNDS: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()


def agree_on_nccl(*hops: Hop) -> None:
    """Raise BackendUnavailableError on every rank of ``hops``, of one route, unless all of them can use NCCL.

    Each hop passes on what the one before it has told: after the last, every rank knows of every rank.
    """
    reason = nccl_unavailable_reason()
    told = {dist.get_rank() if dist.is_initialized() else 0: reason} if reason else {}
    for hop in hops:
        if hop.group is None:
            continue
        store = _store(hop, "sound")
        store.set(str(hop.rank), json.dumps(sorted(told.items())))
        with failing(MAKING, hop.group):
            texts = [store.get(str(rank)) for rank in range(hop.size)]
        told = {rank: text for of_rank in texts for rank, text in json.loads(of_rank)}
    lines = [f"  rank {rank}: {text}" for rank, text in sorted(told.items())]
    if lines:
        raise BackendUnavailableError("backend='nccl' cannot be used:\n" + "\n".join(lines))


def _unique_id(hop: Hop) -> bytes:
    if hop.group is None:
        return b""
    store = _store(hop, "id")
    if hop.rank == 0:
        try:
            made = MADE + kernels.native().nccl_unique_id(nccl_library())
        except RuntimeError as error:  # the others wait for it
            made = str(error).encode()
        store.set("id", made)
    with failing(MAKING, hop.group):
        told = bytes(store.get("id"))
    if not told.startswith(MADE):
        raise CommunicationError(f"no communicator over NCCL: its first rank made no id: {told.decode()}")
    return told[len(MADE) :]


def close_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Finish what is under way over ``group``, or over all that were given to calls, and free the communicators.

    Any number of times. A Topology's are not among them.
    """
    if group is not None:
        _OF_GROUPS.pop(group, None)
        return
    _OF_GROUPS.clear()
    _ALONE.clear()


atexit.register(close_communicators)
