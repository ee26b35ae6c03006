"""Exchanges over gloo as tagged sends and receives: those of different calls never meet.

gloo's own collectives meet by a counter: the k-th on one rank meets the k-th on another, whatever it is. If that brings
more bytes than expected, gloo ends the process. Sends and receives meet by their tag. Here it is a hash of the number
of the exchange on its hop and of the call that it belongs to, so ranks whose calls differ wait, and
:mod:`zcomm._transport.deadlock_watch` finds them out. It costs no byte and no message.

A send of gloo's blocks its caller while it writes to the socket. So a large asynchronous exchange is started by a
background thread of the process ("zcomm-send"), and the caller computes. Another ("zcomm-wait") waits for exchanges of
which somebody asks whether they have ended.

    all_gather, all_to_all      W - 1 receives and sends, straight into place
    broadcast                   a binomial tree from the source
    gather, scatter             W - 1 receives or sends of the first rank

Invariant:
    T1  Of each number and call, a rank starts one exchange. So what is left over of a broken one meets nothing later.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from zcomm._transport.call_context import here
from zcomm._transport.collective_log import CollectiveCall


class Tags(NamedTuple):
    """Of one exchange."""

    own: int
    beside: int
    """Of what the ranks of the other hop hear of it: the same one in every node."""


def tags_of(number: int, call: CollectiveCall) -> Tags:
    """The tags of exchange ``number`` of a hop."""
    return Tags(tag_of(number, call), tag_of(0, call) if call.beside else 0)


def tag_of(number: int, call: CollectiveCall) -> int:
    """The tag of exchange ``number`` of a hop: a multiple of 4, of 31 bits."""
    text = f"{number} {call.operation} {call.nbytes} {call.src} {call.beside} {call.label}"
    return zlib.crc32(text.encode()) & 0x7FFFFFFC


APART_NBYTES = 2**18
"""Sends of at least this many bytes are started by the background thread. gloo's send blocks: it writes to the socket
before it returns, and waits for the connection's lock while bytes are read from the same peer. Measured beside 3 ms of
matrix products on 2 cores: from here on 2 ranks took 0.1 to 0.4 ms less; 4 ranks, two to a core, 0.3 to 0.6 ms less
from 3 MB on, and as long below it."""

Parts = Sequence[tuple[int, Tensor]]
"""What goes to a rank of the hop, or comes from it."""


def exchange(
    group: dist.ProcessGroup, tag: int, receives: Parts, sends: Parts, own: tuple[Tensor, Tensor] | None = None
) -> TaggedExchange:
    """Start receiving and sending contiguous tensors; copy this rank's ``own`` part (to, from) unless they are one."""
    start = partial(_start, group, tag, receives, sends, own)
    if not here().goes_on or sum(part.nbytes for _, part in sends) < APART_NBYTES:
        return TaggedExchange(start(), (receives, sends))
    started = _Started(start)
    pending = TaggedExchange([started], (receives, sends))
    _STARTS.run(started.start)
    return pending


def _start(
    group: dist.ProcessGroup, tag: int, receives: Parts, sends: Parts, own: tuple[Tensor, Tensor] | None
) -> list[Any]:
    works = [group.recv([part], peer, tag) for peer, part in receives]
    works += [group.send([part], peer, tag) for peer, part in sends]
    if own is not None and own[0].data_ptr() != own[1].data_ptr():
        own[0].copy_(own[1])  # while the other parts are in flight
    return works


class _Started:
    """Sends and receives that the background thread starts."""

    def __init__(self, start: Callable[[], list[Any]]) -> None:
        self._start: Callable[[], list[Any]] | None = start
        self._works: list[Any] = []
        self._error: BaseException | None = None
        self._is_started = threading.Event()

    def start(self) -> None:
        """Called by the background thread, once."""
        start, self._start = self._start, None
        assert start is not None, "started once"
        try:
            self._works = start()
        except BaseException as error:  # raised in wait()
            self._error = error
        del start  # releases its tensors before wait() returns: their owner may count who uses them
        self._is_started.set()

    def wait(self) -> None:
        """Block until all have ended."""
        self._is_started.wait()
        if self._error is not None:
            raise self._error
        while self._works:
            self._works.pop(0).wait()


class _Thread:
    """A background thread of the process that runs callables in order; started at the first. They must not raise."""

    def __init__(self, name: str) -> None:
        self._name, self._lock, self._is_running = name, threading.Lock(), False
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, call: Callable[[], None]) -> None:
        """Queue ``call``."""
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                self._is_running = True
        self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get()()


_STARTS, _WAITS = _Thread("zcomm-send"), _Thread("zcomm-wait")


class TaggedExchange:
    """Several sends and receives as one. They end with it: gloo still writes to the tensors of what is under way."""

    def __init__(self, works: Sequence[Any], tensors: Any = ()) -> None:
        self._works, self._tensors = list(works), tensors
        self._lock = threading.Lock()
        self._is_over = not self._works
        self._error: BaseException | None = None
        self._ended: threading.Event | None = None

    def __del__(self) -> None:
        with suppress(Exception):  # the process group may be gone
            self.wait()

    def wait(self) -> None:
        """Block until it has ended; the same error each time."""
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                while self._works:  # gloo's sends and receives can be waited for only once
                    self._works.pop(0).wait()
                self._tensors = ()  # before wait() returns: their owner may count who uses them
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._is_over = True

    def is_completed(self) -> bool:
        """Whether it is known to have ended."""
        return self.ends_within(0)

    def ends_within(self, seconds: float) -> bool:
        """Whether it is known to have ended after at most ``seconds``.

        gloo cannot be asked about sends and receives: the background thread waits for them, in the order of asking.
        """
        if self._is_over:
            return True
        if self._ended is None:
            self._ended = threading.Event()
            _WAITS.run(partial(self._wait, self._ended))
        return self._ended.wait(seconds)

    def _wait(self, ended: threading.Event) -> None:
        with suppress(BaseException):  # wait() raises it again
            self.wait()
        ended.set()


def tree(src: int, rank: int, size: int) -> tuple[int | None, list[int]]:
    """Of whom ``rank`` gets a broadcast from ``src``, and to whom it passes it on: the largest subtree first."""
    place = (rank - src) % size
    low = place & -place or 1 << size.bit_length()
    children = [place + (1 << k) for k in reversed(range(low.bit_length() - 1)) if place + (1 << k) < size]
    parent = None if place == 0 else (src + (place & (place - 1))) % size
    return parent, [(src + child) % size for child in children]


def broadcast(values: Tensor, src: int, place: tuple[dist.ProcessGroup, int, int], tag: int, *, relays: bool) -> Relay:
    """Start a broadcast of ``values`` from rank ``src`` over ``place``: group, size and this rank.

    ``relays`` False: pass on what is in ``values`` now, without waiting for it.
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
    """A rank's part of a broadcast: it sends on in ``wait()``."""

    def __init__(self, first: TaggedExchange, group: dist.ProcessGroup, tag: int, sends: Parts) -> None:
        self._first, self._group, self._tag, self._sends = first, group, tag, sends

    def wait(self) -> None:
        """Block until it has ended."""
        self._first.wait()
        if self._sends:
            sends, self._sends = self._sends, []
            self._first = exchange(self._group, self._tag, [], sends)
            self._first.wait()

    def is_completed(self) -> bool:
        """Whether it is known to have ended."""
        return not self._sends and self._first.is_completed()


def needed(call: CollectiveCall, rank: int, size: int) -> set[int]:
    """The ranks of a hop that must have started ``call`` for it to end on ``rank``."""
    if call.operation in FIRST:
        return set(range(size)) if rank == 0 else {0, rank}
    if call.operation != "broadcast":
        return set(range(size))
    found, at = {rank, *tree(call.src, rank, size)[1]}, tree(call.src, rank, size)[0]
    while at is not None:
        found.add(at)
        at = tree(call.src, at, size)[0]
    return found


def _to_first(message: Tensor, rows: Tensor | None, group: dist.ProcessGroup, tag: int) -> TaggedExchange:
    if rows is None:
        return exchange(group, tag, [], [(0, message)])
    rows[0].copy_(message)
    return exchange(group, tag, [(peer, row) for peer, row in enumerate(rows.unbind(0)) if peer], [])


def _from_first(mine: Tensor, rows: Tensor | None, group: dist.ProcessGroup, tag: int) -> TaggedExchange:
    if rows is None:
        return exchange(group, tag, [(0, mine)], [])
    mine.copy_(rows[0])
    return exchange(group, tag, [], [(peer, row) for peer, row in enumerate(rows.unbind(0)) if peer])


FIRST = {"gather to the first rank": _to_first, "scatter from the first rank": _from_first}
"""What only the first rank needs of all, and all of the first: start it, with the rows that the first rank has."""
