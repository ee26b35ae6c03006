"""Times the phases of a step, gather and reduce, for who asks: ``wall_clock_breakdown``, or torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any, TypeVar, cast

from torch.autograd import profiler

Method = TypeVar("Method", bound=Callable[..., Any])


class Phases:
    """The timer of one optimizer's phases, shared by its parts."""

    def __init__(self) -> None:
        self.timer: Callable[[str], AbstractContextManager[None]] | None = None
        """``timer(phase)`` is entered around each call of a method with :func:`in_phase`; None: nothing is timed."""


def in_phase(phase: str) -> Callable[[Method], Method]:
    """Decorates a method of an object with ``phases``: it belongs to ``phase``, "gather" or "reduce".

    A trace of torch's profiler has it as ``zero.gather`` or ``zero.reduce``, beside torch's own range of ``step``.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def timed(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            timer, is_traced = self.phases.timer, profiler._is_profiler_enabled
            if timer is None and not is_traced:  # a range costs a microsecond also where nothing records it
                return method(self, *args, **kwargs)
            with ExitStack() as stack:
                if is_traced:
                    stack.enter_context(profiler.record_function(f"zero.{phase}"))
                if timer is not None:
                    stack.enter_context(timer(phase))
                return method(self, *args, **kwargs)

        return cast("Method", timed)

    return decorate
