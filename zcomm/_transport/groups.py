"""Process groups of a topology: made, named, and freed to the last thread."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from zcomm._transport.backend import Hop, backend_of, gather_ints, timeout_of
from zcomm._transport.collective_log import failing
from zcomm.errors import StateError


def new_group(
    ranks: list[int], parent: dist.ProcessGroup | None, *, is_local: bool, backend: str | None = None
) -> dist.ProcessGroup | None:
    """A process group of global ``ranks`` with ``parent``'s timeout and, if None, backend; None for ranks outside.

    Called by every rank of the job in the same order; with ``is_local`` by ``ranks`` alone, for parents that are not
    the whole job (torch.distributed then names the group by its ranks and the number of groups that a rank has).
    """
    chosen = backend or _shortest(backend_of(parent))
    with failing("making a process group", ranks):
        group = dist.new_group(ranks, timeout=timeout_of(parent), backend=chosen, use_local_synchronization=is_local)
    return cast(dist.ProcessGroup, group) if dist.get_rank() in ranks else None


def wait_until_made(parent: dist.ProcessGroup | None) -> None:
    """Return once every rank of ``parent`` is here: the groups that it made before are connected on all of them.

    Without it a fast rank might close a group to which a slow one still connects, which fails there. Collective.
    """
    gather_ints(0, parent)


def _shortest(backend: str) -> str:
    """``gloo`` for ``cpu:gloo,cuda:gloo``: torch forgets the default backend of the long form once a plugin exists."""
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    return names.pop() if len(names) == 1 else backend


def destroy_group(group: dist.ProcessGroup, *, is_local: bool) -> None:
    """Free a group of :func:`new_group`.

    With ``is_local`` its name stays taken: the next group of the same ranks would get the same name, and meet this
    one's addresses in the store.
    """
    if not dist.is_initialized() or group not in dist.distributed_c10d._world.pg_map:
        return  # gone with everything
    dist.destroy_process_group(group)
    if is_local:
        _take_group_name()


def level_group_names(group: dist.ProcessGroup | None) -> None:
    """Let the ranks of ``group`` agree on the names that their next groups of ``is_local`` will get.

    torch.distributed names such a group by its ranks and by how many groups the calling rank is in: ranks that are in
    different numbers of groups (a rank may be in one for logging) would wait under different names, and a number
    that comes again, after somebody has destroyed a group, would name two groups alike. Ranks with fewer groups count
    some that are none, until all have as many as any has had.

    Collective over ``group``.
    """
    names = dist.distributed_c10d._world.pg_names
    wanted = max(gather_ints(max(len(names), *_counts_used), group))
    while len(names) < wanted:
        _take_group_name()
    _counts_used[:] = [wanted + 3]  # nobody makes more before leveling again; none of the names comes again


def is_member(group: dist.ProcessGroup | None, global_rank: int) -> bool:
    """Whether that rank of the job is in ``group``; None: all are."""
    try:
        return group is None or dist.get_group_rank(group, global_rank) >= 0
    except ValueError:  # a rank outside of the group
        return False


def _take_group_name() -> None:
    """Let torch.distributed count one more group: an empty one, without threads or connections."""
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    empty: Any = dist.ProcessGroup
    names[empty(0, 1)] = f"zcomm: no group {len(names)}"


class _ClosedGroup:
    """In a hop whose process group was freed: an exchange over it is an error."""

    def __getattr__(self, name: str) -> Any:
        raise StateError("this Topology is closed: no collective runs over it any more")


def close_hop(hop: Hop) -> None:
    """Let go of the process group, wherever the hop is still referred to: its threads live as long as it does.

    A group of gloo has three threads, one of which wakes 100 times a second.
    """
    if hop.group is not None:
        object.__setattr__(hop, "group", _ClosedGroup())


_counts_used = [0]
"""Above the counts in the names of this rank's groups."""
