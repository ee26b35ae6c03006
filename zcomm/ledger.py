"""What a rank has started over one hop, and what it waits for: by it ranks that wait for one another are found out."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from zcomm.errors import DivergedError

__all__ = ["Call", "Ledger", "tracked"]

NUM_KEPT = 64
"""Calls remembered; ranks are never so many exchanges apart."""


class Call(NamedTuple):
    """One exchange, as far as the other ranks must make the same."""

    operation: str
    nbytes: int
    """Of the tensor that this rank gave."""
    device_type: str
    src: int = 0
    """Broadcasts: the rank whose values are sent."""
    is_heard_beside: bool = False
    """Whether it ends only once the ranks of the other hop have judged theirs: the same one of those so marked."""


class Ledger:
    """The exchanges of one hop, numbered from 1: the same on every rank that makes the same calls."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_beside = 0
        """How many of these ended, or will, with the other hop's."""
        self.recent: deque[Call] = deque(maxlen=NUM_KEPT)
        self.times: deque[float] = deque(maxlen=NUM_KEPT)
        """When they were started, by time.monotonic()."""
        self.ended: deque[int] = deque(maxlen=NUM_KEPT)
        """Numbers of exchanges that were waited for to their end."""
        self.waits: dict[int, int] = {}
        """By thread, the exchange that it waits for."""
        self.last_broken = 0
        """Exchanges up to this one carry no values: they were completed only to wake those who waited."""
        self.reason = ""
        self.settled = threading.Event()
        """Whether all that this rank owed to broken exchanges has been started."""

    def start(self, call: Call) -> int:
        """An exchange has been started; returns its number."""
        self.num_started += 1
        self.num_beside += call.is_heard_beside
        self.recent.append(call)
        self.times.append(time.monotonic())
        return self.num_started

    def waiting(self, number: int) -> AbstractContextManager[None]:
        """This thread waits inside for exchange ``number``; DivergedError at the end if it was broken."""
        return _Waiting(self, number)

    def break_until(self, number: int, reason: str) -> None:
        """Nobody may use what exchanges up to ``number`` bring. Before :attr:`settled` nobody goes on."""
        self.settled.clear()
        self.reason, self.last_broken = reason, number


class _Waiting:
    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger, self._number = ledger, number

    def __enter__(self) -> None:
        self._ledger.waits[threading.get_ident()] = self._number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger.waits.pop(threading.get_ident(), None)
        if self._number <= self._ledger.last_broken:
            self._ledger.settled.wait()
            raise DivergedError(self._ledger.reason) from error
        if error is None:
            self._ledger.ended.append(self._number)


class _Waitable(Protocol):
    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class _Tracked:
    def __init__(self, pending: _Waitable, ledger: Ledger, number: int) -> None:
        self._pending, self._ledger, self._number = pending, ledger, number

    def wait(self) -> None:
        with self._ledger.waiting(self._number):
            self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.is_completed()


def tracked(pending: _Waitable, ledger: Ledger, call: Call) -> _Waitable:
    """``pending``, which has just been started, entered into ``ledger``."""
    return _Tracked(pending, ledger, ledger.start(call))
