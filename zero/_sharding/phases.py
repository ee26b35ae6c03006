"""Times the phases of a step, gather and reduce, if somebody asks for it (``wall_clock_breakdown``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """The timer of one optimizer's phases, shared by its parts."""

    def __init__(self) -> None:
        self.timer: Callable[[str], AbstractContextManager[None]] | None = None
        """``timer(phase)`` is entered around each call of a method with :func:`in_phase`; None: nothing is timed."""


class HasPhases(Protocol):
    phases: Phases


S = TypeVar("S", bound=HasPhases)


def in_phase(phase: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method of an object with ``phases``: it belongs to ``phase``, "gather" or "reduce"."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def timed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            timer = self.phases.timer
            if timer is None:
                return method(self, *args, **kwargs)
            with timer(phase):
                return method(self, *args, **kwargs)

        return timed

    return decorate
