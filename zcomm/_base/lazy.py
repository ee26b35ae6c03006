"""A property that is made at the first use and kept, where making it is collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from zcomm._base.rank_context import threads

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801  (a decorator)
    """As functools.cached_property, but with a lock for each object, and for each value of it.

    Without a lock two threads would make two. Up to Python 3.11 cached_property holds one lock for all objects while a
    value is made: a rank that waits for others there would block a thread that makes the value of another object, which
    the others may wait for.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._lock_name = name, f"lock of {name}"

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # asked of the class, by documentation tools
        kept = vars(instance)
        with kept.setdefault(self._lock_name, threads().RLock()):
            if self._name not in kept:
                kept[self._name] = self._make(instance)
            value: T = kept[self._name]
        return value
