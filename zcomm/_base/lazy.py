"""A property that is made at the first use and kept, where making it is collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801  (a decorator)
    """As functools.cached_property, which up to Python 3.11 holds one lock for all objects while a value is made.

    A rank that waits for others there would block every other thread that makes another object's value: a deadlock, if
    that thread is another rank of the process, or one that the others wait for.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # asked of the class, by documentation tools
        value = vars(instance)[self._name] = self._make(instance)
        return value
