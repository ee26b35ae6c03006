"""What a rank keeps for the life of its process: its clock, and one value of every PerRank variable.

A process is one rank. In a simulation several ranks share one: each runs :meth:`RankContext.inside` a context of its
own, and the threads that the library starts there are in it, too. What is kept by process group, by thread or by tensor
needs no such variable: those belong to one rank anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Clock(Protocol):
    """The part of the module :mod:`time` that the library uses."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class RankContext:
    """The context of one rank. ``clock``: what its timeouts count by."""

    def __init__(self, clock: Clock = time) -> None:
        self.clock = clock
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


def bound(call: Callable[P, T]) -> Callable[P, T]:
    """``call`` for another thread, where it belongs to this rank, too."""
    return partial(copy_context().run, call)


class PerRank(Generic[T]):
    """A variable of the process, of which each rank has its own value: ``make()``, at the first use."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def __call__(self) -> T:
        values = _CURRENT.get().values
        value: T | None = values.get(self)
        return values.setdefault(self, self._make()) if value is None else value
