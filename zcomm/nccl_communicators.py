"""Communicators over NCCL: one for the hops of a route, made at the first use by all its ranks together.

The first rank of a hop makes NCCL's unique id; it travels through the process group's own store. So no exchange of
torch's, and no communicator of torch's, is needed.
"""

from __future__ import annotations

import atexit
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
from zcomm.errors import BackendUnavailableError, CommunicationError
from zcomm.nccl_library import nccl_library
from zcomm.starts import prefix_of_start

__all__ = ["Communicator", "agree_on_nccl", "close_communicators", "communicator_over", "inside_first"]

PREFIX = "zcomm-nccl"
ALONE = "alone"
SOUND = b"sound"

Key = tuple[int, tuple[str, ...]]
"""Device, and the hops by the names of their groups."""


class Communicator(NamedTuple):
    """One communicator of this process."""

    native: Any
    """The ``NcclCommunicator``."""
    streams: DeviceStreams
    """What it works on."""


_COMMUNICATORS: WeakKeyDictionary[dist.ProcessGroup, dict[Key, Communicator]] = WeakKeyDictionary()
_ALONE: dict[Key, Communicator] = {}


def inside_first(hops: Sequence[Hop]) -> tuple[Hop, ...]:
    """The hops of a route as a communicator has them: a gather begins between nodes."""
    return tuple(sorted(hops, key=lambda hop: hop.num_inter_peers > 0))


def communicator_over(hops: Sequence[Hop], device: torch.device) -> Communicator:
    """The communicator over ``hops``, inside the node first; at the first use collective over them.

    Raises:
        BackendUnavailableError: A rank has no NCCL. The same on every rank.
        CommunicationError: The ranks did not find one another, with NCCL's text.
    """
    groups = [hop.group for hop in hops if hop.group is not None]
    made = _COMMUNICATORS.setdefault(groups[0], {}) if groups else _ALONE
    key = device.index or 0, tuple(ALONE if hop.group is None else hop.group.group_name for hop in hops)
    if key not in made:
        made[key] = _make(hops, device)
    return made[key]


def _make(hops: Sequence[Hop], device: torch.device) -> Communicator:
    for hop in hops:
        agree_on_nccl(hop)
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


def agree_on_nccl(hop: Hop) -> None:
    """Raise BackendUnavailableError on every rank of ``hop`` unless all of them can use NCCL."""
    reason = nccl_unavailable_reason()
    if hop.group is None:
        found = [reason]
    else:
        store = _store(hop, "sound")
        store.set(str(hop.rank), reason.encode() or SOUND)
        found = ["" if (text := store.get(str(rank))) == SOUND else text.decode() for rank in range(hop.size)]
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(found) if text]
    if lines:
        raise BackendUnavailableError("backend='nccl' cannot be used:\n" + "\n".join(lines))


def _unique_id(hop: Hop) -> bytes:
    if hop.group is None:
        return b""
    store = _store(hop, "id")
    if hop.rank == 0:
        store.set("id", kernels.native().nccl_unique_id(nccl_library()))
    return bytes(store.get("id"))


def close_communicators(group: dist.ProcessGroup | None = None) -> None:
    """Finish what is under way over ``group``, or over all, and free the communicators. Any number of times."""
    if group is not None:
        _COMMUNICATORS.pop(group, None)
        return
    _COMMUNICATORS.clear()
    _ALONE.clear()


atexit.register(close_communicators)
