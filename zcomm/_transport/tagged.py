"""Exchanges over gloo as tagged sends and receives: those of different calls never match.

gloo matches its own collectives by a counter: the k-th on one rank with the k-th on another, whatever they are. If the
message is longer than expected, gloo ends the process. Sends and receives are matched by tag. Here the tag is a hash of
the exchange's number on its hop and of its call. So ranks whose calls differ wait, and the deadlock watch
(:mod:`zcomm._transport.deadlock_watch`) finds them. Tags cost no bytes and no messages.

gloo's send blocks the caller while it writes to the socket. So a background thread of the process ("zcomm-send") starts
large asynchronous exchanges while the caller computes. Another one ("zcomm-wait") waits for exchanges whose completion
was asked for, since gloo has no test for it.

    all_gather, all_to_all      W - 1 receives and sends, straight into place
    broadcast                   a binomial tree from the source
    gather, scatter             W - 1 receives or sends of the first rank

Invariant:
    T1  A rank starts one exchange for each number and call. So leftovers of a broken exchange match nothing later.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from zcomm._base import env
from zcomm._base.daemon_threads import DaemonThread
from zcomm._base.rank_context import PerRank, threads
from zcomm._transport.call_context import current_context
from zcomm._transport.collective_log import CollectiveCall
from zcomm._transport.tagged_group import CPU, Group, TaggedGroup


class Tags(NamedTuple):
    """Tags of one exchange."""

    own: int
    paired: int
    """For the verdict that the ranks of the paired hop exchange: the same in every node."""


def tags_of(number: int, call: CollectiveCall) -> Tags:
    return Tags(tag_of(number, call), tag_of(0, call) if call.pair_number else 0)


def tag_of(number: int, call: CollectiveCall) -> int:
    """The tag of exchange ``number`` of a hop: a multiple of 4, of 31 bits."""
    operation, nbytes, _, src, label, pair_number, _ = call
    text = f"{number} {operation} {nbytes} {src} {pair_number} {label}"
    return zlib.crc32(text.encode()) & 0x7FFFFFFC


BACKGROUND_NBYTES = 2**18
"""The background thread starts sends of at least this many bytes. gloo's send blocks: it writes to the socket before it
returns, and waits for the connection's lock while bytes are read from the same peer. Measured while 2 cores computed
matrix products for 3 ms: from this size on 2 ranks took 0.1 to 0.4 ms less; 4 ranks, two on a core, took 0.3 to 0.6 ms
less from 3 MB on, and the same time below."""

Parts = Sequence[tuple[int, Tensor]]
"""Ranks of the hop, each with the tensor that goes to it or comes from it."""


def exchange(
    group: Group,
    tag: int,
    receives: Parts,
    sends: Parts,
    own: tuple[Tensor, Tensor] | None = None,
    *,
    is_local: bool = False,
) -> TaggedExchange:
    """Start receiving and sending contiguous tensors, and copy this rank's ``own`` part (to, from) if they differ.

    ``is_local``: all ranks are on this node. Then sends start first: gloo's own thread later writes what a peer is not
    yet ready to receive, which took about 2 % off a step on 2 ranks. Between nodes receives start first: gloo announces
    them to the sender in a message, which would queue behind the bytes of the send; over 200 Mbit/s steps took 6 to 8 %
    longer.
    """
    dropped = _DROPPED()
    if dropped:
        _DROP_THREAD().run(_wait_for_dropped)
    if not current_context().overlaps or sum(part.nbytes for _, part in sends) < BACKGROUND_NBYTES:
        works = _start(group, tag, receives, sends, own, is_local=is_local)
        return TaggedExchange(works, (receives, sends), dropped)
    started = _BackgroundStart(partial(_start, group, tag, receives, sends, own, is_local=is_local))
    pending = TaggedExchange([started], (receives, sends), dropped)
    _SEND_THREAD().run(started.start)
    return pending


def _start(
    group: Group, tag: int, receives: Parts, sends: Parts, own: tuple[Tensor, Tensor] | None, *, is_local: bool
) -> list[Any]:
    # Not the group itself, which takes 3 us more for each: it looks for the backend of the tensors' device.
    gloo: Any = group if isinstance(group, TaggedGroup) else group._get_backend(CPU)
    early = [gloo.send([part], peer, tag) for peer, part in sends] if is_local else []
    works = [gloo.recv([part], peer, tag) for peer, part in receives]
    works += early or [gloo.send([part], peer, tag) for peer, part in sends]
    if own is not None and own[0].data_ptr() != own[1].data_ptr():
        own[0].copy_(own[1])  # while the other parts are in flight
    return works


class _BackgroundStart:
    """Sends and receives started by the background thread."""

    def __init__(self, start: Callable[[], list[Any]]) -> None:
        self._start: Callable[[], list[Any]] | None = start
        self._works: list[Any] = []
        self._error: BaseException | None = None
        self._is_started = threads().Event()

    def start(self) -> None:
        """Called once, by the background thread."""
        start, self._start = self._start, None
        assert start is not None, "started once"
        try:
            self._works = start()
        except BaseException as error:  # raised in wait()
            self._error = error
        del start  # drops its tensors before wait() returns: their owner may count references
        self._is_started.set()

    def wait(self) -> None:
        """Block until all are complete."""
        self._is_started.wait()
        if self._error is not None:
            raise self._error
        while self._works:
            self._works.pop(0).wait()


# Threads of their own: a wait blocks until other ranks have sent, and these may need this rank's next send first; and
# an exchange that was dropped because it failed may never be complete.
_SEND_THREAD, _WAIT_THREAD, _DROP_THREAD = (
    PerRank(partial(DaemonThread, f"zcomm-{does}")) for does in ("send", "wait", "drop")
)
Dropped = deque[tuple[list[Any], Any]]
_DROPPED = PerRank(Dropped)
"""Works and tensors of exchanges that were dropped before they were complete: gloo still writes to the tensors."""


def _wait_for_dropped() -> None:
    dropped = _DROPPED()
    while dropped:
        works, _tensors = dropped.popleft()
        with suppress(Exception):  # the process group may be destroyed
            while works:
                works.pop(0).wait()


class TaggedExchange:
    """Several sends and receives as one. Dropped before they are complete, they are kept until then."""

    def __init__(self, works: list[Any], tensors: Any = (), dropped: Dropped | None = None) -> None:
        self._works, self._tensors, self._dropped = works, tensors, _DROPPED() if dropped is None else dropped
        self._lock = threads().Lock()
        self._is_complete = not self._works
        self._error: BaseException | None = None
        self._completed: threading.Event | None = None

    def __del__(self) -> None:
        # No wait here: a garbage collection may drop this while the thread holds any lock, and before it has sent what
        # the other ranks need.
        if self._works:
            self._dropped.append((self._works, self._tensors))

    def wait(self) -> None:
        """Block until it is complete. Raises the same error each time."""
        with self._lock:  # a caller and "zcomm-wait" may both wait
            if self._error is not None:
                raise self._error
            try:
                while self._works:  # gloo's sends and receives can be waited for only once
                    self._works.pop(0).wait()
                self._tensors = ()  # before wait() returns: their owner may count references
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._is_complete = True

    def is_completed(self) -> bool:
        """Whether it is known to be complete."""
        return self.ends_within(0)

    def ends_within(self, seconds: float) -> bool:
        """Whether it is known to be complete after at most ``seconds``.

        gloo has no test for sends and receives: the background thread waits for them, in the order of the calls.
        """
        if self._is_complete:
            return True
        if self._completed is None:
            self._completed = threads().Event()
            _WAIT_THREAD().run(partial(self._wait, self._completed))
        return self._completed.wait(seconds)

    def _wait(self, ended: threading.Event) -> None:
        with suppress(BaseException):  # wait() raises it again
            self.wait()
        ended.set()


def tree(src: int, rank: int, size: int) -> tuple[int | None, list[int]]:
    """The parent and the children of ``rank`` in a broadcast from ``src``, the largest subtree first."""
    place = (rank - src) % size
    low = place & -place or 1 << size.bit_length()
    children = [place + (1 << k) for k in reversed(range(low.bit_length() - 1)) if place + (1 << k) < size]
    parent = None if place == 0 else (src + (place & (place - 1))) % size
    return parent, [(src + child) % size for child in children]


def broadcast(values: Tensor, src: int, place: tuple[Group, int, int], tag: int, *, relays: bool) -> Relay:
    """Start a broadcast of ``values`` from rank ``src`` over ``place``: group, size and this rank.

    ``relays=False`` sends what is in ``values`` now, without waiting for the parent: to end a deadlock.
    """
    group, size, rank = place
    parent, children = tree(src, rank, size)
    receives = [] if parent is None else [(parent, values)]
    sends = [(child, values) for child in children]
    if relays and receives:
        return Relay(exchange(group, tag, receives, []), group, tag, sends)
    spare = values if not receives else values.clone()
    return Relay(exchange(group, tag, [(peer, spare) for peer, _ in receives], sends), group, tag, [])


class Relay:
    """A rank's part of a broadcast: ``wait()`` receives, then sends to the children."""

    def __init__(self, first: TaggedExchange, group: Group, tag: int, sends: Parts) -> None:
        self._first, self._group, self._tag, self._sends = first, group, tag, sends

    def wait(self) -> None:
        self._first.wait()
        if self._sends:
            sends, self._sends = self._sends, []
            self._first = exchange(self._group, self._tag, [], sends)
            self._first.wait()

    def is_completed(self) -> bool:
        """Whether it is known to be complete."""
        return not self._sends and self._first.is_completed()


def ranks_needed(call: CollectiveCall, rank: int, size: int) -> set[int]:
    """The ranks of a hop that must have started ``call`` for it to complete on ``rank``."""
    if env.is_set("ZCOMM_CHECK"):  # every rank waits for the verdict of all
        return set(range(size))
    if call.operation in FIRST_RANK_EXCHANGES:
        return set(range(size)) if rank == 0 else {0, rank}
    if call.operation != "broadcast":
        return set(range(size))
    found, at = {rank, *tree(call.src, rank, size)[1]}, tree(call.src, rank, size)[0]
    while at is not None:
        found.add(at)
        at = tree(call.src, at, size)[0]
    return found


def _to_first(message: Tensor, rows: Tensor | None, group: Group, tag: int) -> TaggedExchange:
    if rows is None:
        return exchange(group, tag, [], [(0, message)])
    rows[0].copy_(message)
    return exchange(group, tag, [(peer, row) for peer, row in enumerate(rows.unbind(0)) if peer], [])


def _from_first(mine: Tensor, rows: Tensor | None, group: Group, tag: int) -> TaggedExchange:
    if rows is None:
        return exchange(group, tag, [(0, mine)], [])
    mine.copy_(rows[0])
    return exchange(group, tag, [], [(peer, row) for peer, row in enumerate(rows.unbind(0)) if peer])


FIRST_RANK_EXCHANGES = {"gather to the first rank": _to_first, "scatter from the first rank": _from_first}
"""Starts an exchange between the first rank, which passes its rows, and each other rank, by operation."""
