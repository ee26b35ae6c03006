"""What a rank has started over one hop, and what it waits for: by it ranks that wait for one another are found out.

What torch raises when an exchange over one of its process groups fails, as the error that says which and what to do.

torch raises a bare RuntimeError, with the address of a peer: "Connection closed by peer [127.0.0.1]:18153".
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, NamedTuple

import torch.distributed as dist

from zcomm._base.pending import Pending, ends_within
from zcomm._transport.call_context import here
from zcomm.errors import CommunicationError, DivergedError

Members = dist.ProcessGroup | Sequence[int] | None
"""A process group, or the global ranks of those who take part; None: all of torch.distributed."""
REMEDY = (
    "A rank has ended or makes another call: see the first error in the other ranks' logs; ZCOMM_DEBUG=1 names the "
    "ranks, their calls and lines"
)
MAX_NAMED = 16


def as_communication_error(error: BaseException, exchange: str, members: Members) -> BaseException:
    """``error`` itself, unless torch has raised it for ``exchange`` among ``members``: then what to raise from it.

    What this rank alone has done wrong stays as it is: errors of zcomm, of arguments, of memory, of CUDA.
    """
    is_of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if not is_of_torch or "DefaultCPUAllocator" in str(error):
        return error
    text = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
    return CommunicationError(f"{exchange} failed{_place(members)}: {text}. {REMEDY}")


def _place(members: Members) -> str:
    with suppress(Exception):  # the process group may be gone
        ranks = list(members) if isinstance(members, Sequence) else dist.get_process_group_ranks(members)
        named = ", ".join(map(str, ranks[:MAX_NAMED]))
        more = f", ... ({len(ranks)} ranks)" if len(ranks) > MAX_NAMED else ""
        return f" on rank {dist.get_rank()} of ranks {named}{more}"
    return ""


NUM_KEPT = 64
"""Calls remembered; ranks are never so many exchanges apart."""

State = Literal["started", "waited for", "ended", "failed"]


class CollectiveCall(NamedTuple):
    """One exchange, as far as the other ranks must make the same."""

    operation: str
    nbytes: int
    """Of the tensor that this rank gave."""
    device_type: str
    src: int = 0
    """Broadcasts: the rank whose values are sent."""
    label: str = ""
    """The public call that it belongs to, and what it is done for."""
    beside: int = 0
    """Its number among those that end only once the ranks of the other hop have judged theirs; 0: it is none."""


def call_here(operation: str, nbytes: int, device_type: str, src: int = 0) -> CollectiveCall:
    """A call of this thread."""
    context = here()
    return CollectiveCall(operation, nbytes, device_type, src, f"{context.call}|{context.bucket}")


@dataclass(slots=True)
class LogEntry:
    """One exchange, as this rank has seen it."""

    number: int
    """Of the exchanges of its hop, from 1; the same on every rank."""
    call: CollectiveCall
    format: str
    bucket: str
    """What the caller calls it, as :func:`zcomm._transport.call_context.in_bucket` says; empty: nothing."""
    begun: float
    """By time.time()."""
    state: State = "started"
    within: str = ""
    """The public call that it is made in, if it belongs to none."""


class CollectiveLog:
    """The exchanges of one hop, numbered from 1: the same on every rank that makes the same calls.

    Any thread may call anything; what one look returns was true at one moment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_started = 0
        self.num_beside = 0
        """How many calls of :meth:`beside` there were."""
        self.num_carried = 0
        """Exchanges over the hop's carrier, which have no entries."""
        self._entries: deque[LogEntry] = deque(maxlen=NUM_KEPT)
        self._waits: dict[int, int] = {}
        """By thread, the exchange that it waits for."""
        self._callers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Threads that have started any. Not their idents: a new thread may get that of one that has ended."""
        self.last_broken = 0
        """Exchanges up to this one carry no values: they were completed only to wake those who waited."""
        self.reason = ""
        self.lost: Callable[[], str] = str
        """What is known of ranks that have left; empty: nothing."""
        self.settled = threading.Event()
        """Whether all that this rank owed to broken exchanges has been started."""

    def start(self, call: CollectiveCall, wire: str = "none") -> int:
        """An exchange has been started, of messages in format ``wire``; returns its number."""
        with self._lock:
            self.num_started += 1
            self._callers.add(threading.current_thread())
            entry = LogEntry(self.num_started, call, wire, here().bucket, time.time(), within=here().within)
            self._entries.append(entry)
            return entry.number

    def carry(self) -> int:
        """An exchange over the hop's carrier; returns its number among those."""
        with self._lock:
            self.num_carried += 1
            return self.num_carried

    def beside(self, call: CollectiveCall) -> CollectiveCall:
        """``call``, which ends with the other hop's."""
        with self._lock:
            self.num_beside += 1
            return call._replace(beside=self.num_beside)

    def entries(self) -> list[LogEntry]:
        """Copies of the last :data:`NUM_KEPT`, oldest first."""
        with self._lock:
            return [replace(entry) for entry in self._entries]

    def account(self) -> tuple[int, dict[int, int], list[CollectiveCall], int]:
        """How many were started; by thread, which is waited for; the last calls; :attr:`num_beside`."""
        with self._lock:
            calls = [entry.call for entry in self._entries]
            return self.num_started, dict(self._waits), calls, self.num_beside

    def callers(self) -> set[int]:
        """The threads that have started any exchange and still run."""
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
        """This thread waits inside for exchange ``number`` among ``members``.

        At the end DivergedError if it was broken, CommunicationError if torch has raised.
        """
        return _Waiting(self, number, members)

    def name(self, number: int) -> str:
        """Exchange ``number`` in words."""
        with self._lock:
            for entry in self._entries:
                if entry.number == number:
                    bucket = f", bucket {entry.bucket}" if entry.bucket else ""
                    call = f"{entry.call.operation} of {entry.call.nbytes} bytes, {entry.format}{bucket}"
                    return f"{call} (number {number})"
        return f"exchange number {number}"

    def call_name(self, number: int, phase: str) -> str:
        """The public call that exchange ``number`` belongs to; if there is none, ``phase`` and the exchange."""
        entry = next((entry for entry in self.entries() if entry.number == number), None)
        label = "" if entry is None else entry.call.label.partition("|")[0] or entry.within
        return label or phase + self.name(number)

    def break_until(self, number: int, reason: str) -> None:
        """Nobody may use what exchanges up to ``number`` bring. Before :attr:`settled` nobody goes on."""
        self.settled.clear()
        self.reason, self.last_broken = reason, number


class _Waiting:
    def __init__(self, ledger: CollectiveLog, number: int, members: Members) -> None:
        self._ledger, self._number, self._members = ledger, number, members

    def __enter__(self) -> None:
        self._ledger._move(self._number, "waited for")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_broken = self._number <= self._ledger.last_broken
        self._ledger._move(self._number, "ended" if error is None and not is_broken else "failed")
        if is_broken:
            self._ledger.settled.wait()
            raise DivergedError(self._ledger.reason) from error
        if error is not None:
            _raise(error, self._ledger.name(self._number), self._members, self._ledger.lost)


def _raise(error: BaseException, exchange: str, members: Members, lost: Callable[[], str] = str) -> None:
    """If torch has raised ``error`` for the exchange, raise what says so, else return."""
    told = as_communication_error(error, exchange, members)
    if told is not error:
        raise (DivergedError(reason) if (reason := lost()) else told) from error


@contextmanager
def failing(exchange: str, members: Members, lost: Callable[[], str] = str) -> Iterator[None]:
    """What raises inside is ``exchange`` among ``members`` that failed; CommunicationError if torch has raised.

    DivergedError instead, if ``lost`` has words for ranks that have left.
    """
    try:
        yield
    except BaseException as error:
        _raise(error, exchange, members, lost)
        raise


class _TrackedWork:
    def __init__(self, pending: Pending, ledger: CollectiveLog, number: int, members: Members) -> None:
        self._pending, self._ledger, self._number, self._members = pending, ledger, number, members

    def wait(self) -> None:
        with self._ledger.waiting(self._number, self._members):
            self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.is_completed()

    def ends_within(self, seconds: float) -> bool:
        return ends_within(self._pending, seconds)


def tracked(pending: Pending, ledger: CollectiveLog, number: int, members: Members) -> Pending:
    """``pending``, exchange ``number`` of ``ledger``, just started among ``members``."""
    return _TrackedWork(pending, ledger, number, members)
