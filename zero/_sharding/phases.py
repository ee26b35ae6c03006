"""Times the phases of a step, gather and reduce, if somebody asks for it (``wall_clock_breakdown``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class Phases:
    """The timer of one optimizer's phases, shared by its parts."""

    def __init__(self) -> None:
        self.timer: Callable[[str], AbstractContextManager[None]] | None = None
        """``timer(phase)`` is entered around each call of a method with :func:`in_phase`; None: nothing is timed."""


def in_phase(phase: str) -> Callable[[Method], Method]:
    """Decorates a method of an object with ``phases``: it belongs to ``phase``, "gather" or "reduce"."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def timed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            timer = self.phases.timer
            if timer is None:
                return method(self, *args, **kwargs)
            with timer(phase):
                return method(self, *args, **kwargs)

        return cast("Method", timed)

    return decorate
