"""Creating, sharing, naming and destroying the process groups of a topology, including their threads.

Background is a thread for work that overlaps training, with a gloo group of its own. Every rank submits the same
functions in the same order, so their collectives match. The group is not shared with the main thread: two threads that
start collectives on one group would start them in a different order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from zcomm._base.rank_context import PerRank, bound, threads
from zcomm._transport.backend import ALONE, Hop, backend_of, gather_ints, hop_over, timeout_of
from zcomm._transport.collective_log import failing
from zcomm._transport.tagged_group import given, is_open
from zcomm.errors import StateError


@dataclass
class SharedGroup:
    """A gloo process group that hops of several topologies of the same ranks use, apart by their tags."""

    group: dist.ProcessGroup
    number: int
    """Tells it from the other groups of the same ranks and purpose; the same on all its ranks, at least 1."""
    num_channels: int = 0
    """Topologies that have used it so far."""
    users: WeakSet[object] = field(default_factory=WeakSet)
    """Topologies that use it now; not those that were garbage-collected without being closed."""


_SHARED: WeakKeyDictionary[dist.ProcessGroup, dict[int, SharedGroup]] = WeakKeyDictionary()
"""By the group of the ranks, and by purpose: what two topologies have to do at the same time needs two connections."""
MAX_CHANNELS = 2**32


def share_group(
    user: object, parent: dist.ProcessGroup | None, purpose: int, *, is_local: bool
) -> tuple[SharedGroup, int]:
    """The gloo group of all ranks of ``parent`` for ``purpose``, and the number of ``user``'s channel. Collective.

    The group is made at the first use, and again after the last user has released it. A rank may have closed its last
    topology before the others, so all ranks compare which group they have.
    """
    of_parent = _SHARED.setdefault(given(parent), {})
    known = of_parent.get(purpose)
    if known is not None and not is_open(known.group):  # destroyed with the default one
        known = None
    words = gather_ints(0 if known is None else known.number * MAX_CHANNELS + known.num_channels, parent)
    numbers, channels = zip(*(divmod(word, MAX_CHANNELS) for word in words), strict=True)
    if known is None or set(numbers) != {known.number}:
        if is_local:
            level_group_names(parent)
        ranks = dist.get_process_group_ranks(given(parent))
        group = new_group(ranks, parent, is_local=is_local, backend="gloo")
        assert group is not None, "a rank outside of its own group"
        wait_until_made(parent)
        known, channels = SharedGroup(group, max(numbers) + 1), (0,)
        of_parent[purpose] = known
    known.num_channels = max(channels) + 1
    known.users.add(user)
    return known, known.num_channels


def release_group(user: object, shared: SharedGroup, *, is_local: bool) -> None:
    """End ``user``'s use of ``shared``; the last one destroys the group."""
    shared.users.discard(user)
    if not shared.users:
        for of_parent in _SHARED.values():
            for purpose in [purpose for purpose, one in of_parent.items() if one is shared]:
                del of_parent[purpose]
        destroy_group(shared.group, is_local=is_local)


def new_group(
    ranks: list[int], parent: dist.ProcessGroup | None, *, is_local: bool, backend: str | None = None
) -> dist.ProcessGroup | None:
    """A process group of global ``ranks`` with the timeout of ``parent``; None on other ranks.

    Every rank of the job calls it, in the same order. With ``is_local`` only ``ranks`` do, for parents that do not have
    all ranks of the job; torch.distributed then names the group by its ranks and the number of groups of the caller.
    ``backend`` None is the parent's.
    """
    chosen = backend or shortest(backend_of(parent))
    with failing("making a process group", ranks), _no_splits() if is_local else nullcontext():
        group = dist.new_group(ranks, timeout=timeout_of(parent), backend=chosen, use_local_synchronization=is_local)
    return cast(dist.ProcessGroup, group) if dist.get_rank() in ranks else None


@contextmanager
def _no_splits() -> Iterator[None]:
    """Within the block torch splits no new group off the default one, which all ranks of the job would have to call.

    It does so where ``init_process_group`` was given a ``device_id``, also for groups that only their ranks make: they
    would wait for ever for the others. Groups that other threads make meanwhile are not split either.
    """
    default = dist.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if default is None or device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def wait_until_made(parent: dist.ProcessGroup | None) -> None:
    """Return once every rank of ``parent`` has made its groups. Collective; a barrier.

    Without it a fast rank could close a group while a slow one still connects to it, and that one would fail.
    """
    gather_ints(0, parent)


def shortest(backend: str) -> str:
    """``gloo`` for ``cpu:gloo,cuda:gloo``: torch forgets the default backend of the long form once a plugin exists."""
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    return names.pop() if len(names) == 1 else backend


def destroy_group(group: dist.ProcessGroup, *, is_local: bool) -> None:
    """Free a group of :func:`new_group`.

    With ``is_local`` its name stays in use. Otherwise the next group of the same ranks would get the same name and
    read this group's stale addresses from the store.
    """
    if not is_open(group):
        return  # already destroyed with the default process group
    dist.destroy_process_group(group)
    if is_local:
        _take_group_name()


def level_group_names(group: dist.ProcessGroup | None) -> None:
    """Make the ranks of ``group`` agree on the names of their next ``is_local`` groups. Collective over ``group``.

    torch.distributed names such a group by its ranks and by the number of groups that the calling rank is in. Ranks in
    different numbers of groups (one may have a group for logging) would wait for each other under different names, and
    a number that recurs after a group was destroyed would name two groups alike. So ranks with fewer groups register
    empty ones, until every rank has the highest number that any rank has had.
    """
    names = dist.distributed_c10d._world.pg_names
    wanted = max(gather_ints(max(len(names), *_counts_used()), group))
    while len(names) < wanted:
        _take_group_name()
    # A topology makes at most 3 groups before the next leveling: no name is used twice.
    _counts_used()[:] = [wanted + 3]


def is_member(group: dist.ProcessGroup | None, global_rank: int) -> bool:
    """Whether ``global_rank`` is in ``group``; None has all ranks."""
    try:
        return group is None or dist.get_group_rank(group, global_rank) >= 0
    except ValueError:  # a rank outside of the group
        return False


def _take_group_name() -> None:
    """Register one more group with torch.distributed: an empty one, without threads or connections."""
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    empty: Any = dist.ProcessGroup
    names[empty(0, 1)] = f"zcomm: no group {len(names)}"


class _ClosedGroup:
    """Replaces the process group of a closed hop: any use of it raises StateError."""

    def __getattr__(self, name: str) -> Any:
        raise StateError("this Topology is closed: make another one for further collectives")


def close_hop(hop: Hop) -> None:
    """Drop the process group, even if the hop is still referenced: its threads live as long as the object.

    A gloo group has three threads, one of which wakes up 100 times a second.
    """
    if hop.group is not None:
        hop.group = cast(Any, _ClosedGroup())


_counts_used = PerRank(lambda: [0])
"""Larger than every count in the names of this rank's groups."""


T = TypeVar("T")


class Background:
    """One thread, started at the first submit. The interpreter waits at exit for everything submitted.

    Args:
        group: A gloo group of all ranks of a topology; None for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.hop = ALONE if group is None else hop_over(group)
        """For the deadlock watch."""
        self.last: Any = None
        """For the submitter: the work to wait for before it submits more."""
        self._thread = threads().Executor(1, thread_name_prefix="zcomm-background")

    def submit(self, function: Callable[[], T]) -> Future[T]:
        return self._thread.submit(bound(function))

    def close(self, *, waits: bool = True) -> None:
        """End the thread after everything submitted, and wait for that. Errors are raised by the futures."""
        self._thread.shutdown(wait=waits)
