"""The collective log of a hop: which exchanges this rank has started and waits for. The deadlock watch reads it.

It also converts errors: when an exchange fails, torch raises a bare RuntimeError with the address of a peer
("Connection closed by peer [127.0.0.1]:18153"). Here that becomes a CommunicationError that names the exchange, its
ranks and a remedy, or a DivergedError if the ranks made different calls.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, NamedTuple

import torch.distributed as dist

from zcomm._base.pending import Pending, ends_within
from zcomm._base.rank_context import clock, threads
from zcomm._transport.call_context import current_context
from zcomm._transport.tagged_group import Group, ranks_of
from zcomm.errors import CommunicationError, DivergedError

Members = Group | Sequence[int] | None
"""A process group, or global ranks; None: all ranks of torch.distributed."""
REMEDY = (
    "A rank has ended or makes another call: see the first error in the other ranks' logs; ZCOMM_DEBUG=1 names the "
    "ranks, their calls and lines"
)
MAX_NAMED = 16
OWN_ERRORS = ("DefaultCPUAllocator", "can't start new thread")
"""Texts of errors of one rank alone."""


def as_communication_error(error: BaseException, exchange: str, members: Members) -> BaseException:
    """A CommunicationError if torch raised ``error`` for ``exchange`` among ``members``, else ``error`` itself.

    Errors of this rank alone are not converted: those of zcomm, arguments, memory, threads and CUDA.
    """
    is_of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if not is_of_torch or any(text in str(error) for text in OWN_ERRORS):
        return error
    text = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
    return CommunicationError(f"{exchange} failed{_place(members)}: {text}. {REMEDY}")


def _place(members: Members) -> str:
    with suppress(Exception):  # the process group may be gone
        ranks = list(members) if isinstance(members, Sequence) else ranks_of(members)
        named = ", ".join(map(str, ranks[:MAX_NAMED]))
        more = f", ... ({len(ranks)} ranks)" if len(ranks) > MAX_NAMED else ""
        return f" on rank {dist.get_rank()} of ranks {named}{more}"
    return ""


NUM_KEPT = 64
"""Calls remembered. Ranks are never this many exchanges apart, so the oldest call that any rank lacks is kept."""

State = Literal["started", "waited for", "ended", "failed"]


class CollectiveCall(NamedTuple):
    """What must be equal on all ranks for an exchange to match. Its text is hashed into the tag (tagged.py)."""

    operation: str
    nbytes: int
    """Of this rank's tensor."""
    device_type: str
    src: int = 0
    """Broadcasts: the rank whose values are sent."""
    label: str = ""
    """The public call that it belongs to, and the bucket."""
    pair_number: int = 0
    """With ZCOMM_CHECK=1, its number among the exchanges that wait for the verdict of the paired hop; 0: not one."""
    sizes: str = ""
    """Uneven shards: the bytes of each rank of the hop, in rank order. Text, since the watch sends calls as JSON.

    Not in the tag, since the hops of a pair differ in them; the label has what they follow from, the call's sizes.
    """


def call_here(operation: str, nbytes: int, device_type: str, src: int = 0) -> CollectiveCall:
    """A call in the context of this thread."""
    context = current_context()
    return CollectiveCall(operation, nbytes, device_type, src, f"{context.call}|{context.bucket}")


@dataclass(slots=True)
class LogEntry:
    """One exchange, as seen by this rank."""

    number: int
    """Counts the exchanges of the hop from 1; the same on every rank."""
    call: CollectiveCall
    format: str
    bucket: str
    """As given to :func:`zcomm._transport.call_context.in_bucket`; empty outside of it."""
    started_at: float
    """As of clock().time()."""
    state: State = "started"
    within: str = ""
    """The public call in which it was started, if it does not belong to one (:attr:`Context.within`)."""


class CollectiveLog:
    """The exchanges of one hop, numbered from 1: the same on every rank that makes the same calls.

    Thread-safe. Each method returns a consistent state under one lock: the watch compares those of all ranks, and a
    torn state could show a deadlock where there is none.
    """

    def __init__(self) -> None:
        self._lock, self._time = threading.Lock(), clock().time
        self.num_started = 0
        self.num_pairs = 0
        """The number of calls of :meth:`number_pair`."""
        self.num_nccl = 0
        """Exchanges over :attr:`Hop.nccl`, which have no entries here: the log of their stream has."""
        self._entries: deque[LogEntry] = deque(maxlen=NUM_KEPT)
        self._waits: dict[int, int] = {}
        """By thread, the number of the exchange that it waits for."""
        self._last_caller: Callable[[], threading.Thread | None] = lambda: None
        self._callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Threads that have started any. Not their idents: a new thread may reuse the ident of one that has ended
        (tests/zero/test_diverging_ranks.py)."""
        self.last_broken = 0
        """Results of exchanges up to this number are invalid: they were completed only to end a deadlock."""
        self.reason = ""
        self.departed: Callable[[], str] = str
        """Describes ranks that have left the topology; empty: none is known."""
        self.missing_started = threads().Event()
        """Set once this rank has started its missing part of all broken exchanges."""

    def start(self, call: CollectiveCall, wire: str = "none", *, is_missing: bool = False) -> int:
        """Log an exchange that is about to start, with messages in format ``wire``; returns its number.

        ``is_missing``: the watch starts it because other ranks have (D2 of deadlock_watch.py).
        """
        if self.num_started < self.last_broken and not is_missing:
            self.missing_started.wait()  # until the watch has started what this rank lacks of broken exchanges
        context = current_context()
        with self._lock:
            self.num_started += 1
            if (caller := threading.current_thread()) is not self._last_caller():
                self._callers.add(caller)
                self._last_caller = weakref.ref(caller)
            self._entries.append(
                LogEntry(self.num_started, call, wire, context.bucket, self._time(), "started", context.within)
            )
            return self.num_started

    def count_nccl(self) -> int:
        """Count an exchange over :attr:`Hop.nccl`; returns its number among those."""
        with self._lock:
            self.num_nccl += 1
            return self.num_nccl

    def number_pair(self, call: CollectiveCall) -> CollectiveCall:
        """``call`` with the next :attr:`CollectiveCall.pair_number`."""
        if self.num_started < self.last_broken:
            self.missing_started.wait()  # as in start()
        with self._lock:
            self.num_pairs += 1
            return call._replace(pair_number=self.num_pairs)

    def entries(self) -> list[LogEntry]:
        """Copies of the last :data:`NUM_KEPT` entries, oldest first."""
        with self._lock:
            return [replace(entry) for entry in self._entries]

    def snapshot(self) -> tuple[int, dict[int, int], list[CollectiveCall], int]:
        """The number started; by thread, the number it waits for; the last calls; :attr:`num_pairs`."""
        with self._lock:
            calls = [entry.call for entry in self._entries]
            return self.num_started, dict(self._waits), calls, self.num_pairs

    def callers(self) -> set[int]:
        """Idents of live threads that have started an exchange."""
        with self._lock:
            return {thread.ident for thread in self._callers if thread.is_alive() and thread.ident is not None}

    def _move(self, number: int, state: State) -> None:
        with self._lock:
            if state == "waited for":
                self._waits[threading.get_ident()] = number
            else:
                self._waits.pop(threading.get_ident(), None)
            place = number - self.num_started + len(self._entries) - 1
            if place >= 0:
                self._entries[place].state = state

    def waiting(self, number: int, members: Members) -> AbstractContextManager[None]:
        """A context in which this thread waits for exchange ``number`` among ``members``.

        Its exit raises DivergedError if the exchange was broken, and CommunicationError if torch has raised.
        """
        return _Waiting(self, number, members)

    def name(self, number: int) -> str:
        """A description of exchange ``number``."""
        with self._lock:
            for entry in self._entries:
                if entry.number == number:
                    bucket = f", bucket {entry.bucket}" if entry.bucket else ""
                    call = f"{entry.call.operation} of {entry.call.nbytes} bytes, {entry.format}{bucket}"
                    return f"{call} (number {number})"
        return f"exchange number {number}"

    def call_name(self, number: int, phase: str) -> str:
        """The public call of exchange ``number``, or ``phase`` and its description if it belongs to none."""
        entry = next((entry for entry in self.entries() if entry.number == number), None)
        label = "" if entry is None else entry.call.label.partition("|")[0] or entry.within
        return label or phase + self.name(number)

    def mark_broken(self, number: int, reason: str) -> None:
        """Make waits for exchanges up to ``number`` raise DivergedError, after :attr:`missing_started` is set."""
        self.missing_started.clear()  # before last_broken: a thread that sees the number must wait for the event
        self.reason, self.last_broken = reason, number


class _Waiting:
    def __init__(self, log: CollectiveLog, number: int, members: Members) -> None:
        self._log, self._number, self._members = log, number, members

    def __enter__(self) -> None:
        self._log._move(self._number, "waited for")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_broken = self._number <= self._log.last_broken
        self._log._move(self._number, "ended" if error is None and not is_broken else "failed")
        if is_broken:
            # Not earlier: the caller's next exchange must get the same number on every rank (D2 of deadlock_watch.py).
            self._log.missing_started.wait()
            raise DivergedError(self._log.reason) from error
        if error is not None:
            raise_converted(error, self._log.name(self._number), self._members, self._log.departed)


def raise_converted(error: BaseException, exchange: str, members: Members, departed: Callable[[], str] = str) -> None:
    """Raise the converted error if torch has raised ``error`` for the exchange, else return."""
    converted = as_communication_error(error, exchange, members)
    if converted is not error:
        if reason := departed():
            converted = DivergedError(reason)
        converted.has_lost_a_rank = True  # type: ignore[attr-defined]
        raise converted from error


def has_lost_a_rank(error: BaseException) -> bool:
    """Whether torch ended an exchange with ``error``: a connection is lost or timed out, and later ones fail, too."""
    return getattr(error, "has_lost_a_rank", False)


@contextmanager
def failing(exchange: str, members: Members, departed: Callable[[], str] = str) -> Iterator[None]:
    """A context that runs ``exchange`` among ``members``: an error of torch becomes a CommunicationError.

    It becomes a DivergedError if ``departed`` describes ranks that have left.
    """
    try:
        yield
    except BaseException as error:
        raise_converted(error, exchange, members, departed)
        raise


class TrackedWork(_Waiting):
    """``pending``, with its waits recorded as those for exchange ``number`` of ``log`` among ``members``."""

    def __init__(self, pending: Pending, log: CollectiveLog, number: int, members: Members) -> None:
        self._pending, self._log, self._number, self._members = pending, log, number, members

    def wait(self) -> None:
        with self:
            self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.is_completed()

    def ends_within(self, seconds: float) -> bool:
        return ends_within(self._pending, seconds)
