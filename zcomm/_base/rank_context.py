"""What a rank keeps for the life of its process: its clock, its threads, and one value of every PerRank variable.

A process is one rank. In a simulation several ranks share one: each runs :meth:`RankContext.inside` a context of its
own, and the threads that the library starts there are in it, too. What is kept by process group, by thread or by tensor
needs no such variable: those belong to one rank anyway.

What may block comes from :func:`clock` and :func:`threads`, so that a simulation decides who runs next. A lock that is
never held while something else is waited for may be an ordinary one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Clock(Protocol):
    """The part of the module :mod:`time` that the library uses."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Threads:
    """The threads of a process, and what they wait for each other with."""

    Thread = threading.Thread
    Event = threading.Event
    Lock = threading.Lock
    RLock = threading.RLock
    SimpleQueue = queue.SimpleQueue
    Executor = ThreadPoolExecutor
    main_thread = staticmethod(threading.main_thread)
    waiting_files = frozenset({threading.__file__, queue.__file__})
    """A thread whose innermost Python frame is in one of these waits for another thread."""
    hidden_files: frozenset[str] = frozenset()
    """Frames in these are left out of stacks."""


class RankContext:
    """The context of one rank: what its timeouts count by, and how its threads wait for each other."""

    def __init__(self, clock: Clock = time, threads: type[Threads] = Threads) -> None:
        self.clock, self.threads = clock, threads
        self.values: dict[object, Any] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, this thread and the library's threads that it starts belong to this rank."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[RankContext] = ContextVar("rank", default=RankContext())  # noqa: B039


def clock() -> Clock:
    """The clock of this rank."""
    return _CURRENT.get().clock


def threads() -> type[Threads]:
    """The threads of this rank."""
    return _CURRENT.get().threads


def bound(call: Callable[P, T]) -> Callable[P, T]:
    """``call`` for another thread, where it belongs to this rank, too.

    Not in a copy of all context variables: a thread that lives as long as the process would keep a user's values.
    """
    context = _CURRENT.get()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with context.inside():
            return call(*args, **kwargs)

    return run


class PerRank(Generic[T]):
    """A variable of the process, of which each rank has its own value: ``make()``, at the first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def __call__(self) -> T:
        values = _CURRENT.get().values
        value: T | None = values.get(self)
        return values.setdefault(self, self._make()) if value is None else value
