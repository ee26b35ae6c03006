"""How long a rank is busy with exchanges: for wall_clock_breakdown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from zero._runtime.runtime import Runtime


def time_exchanges(runtime: Runtime, timed: Callable[[str], AbstractContextManager[None]]) -> None:
    """From now on everything that gathers parameters or reduces gradients runs within ``timed``.

    ``timed("gather")`` is entered for each gather that is issued and waited for, and for the one after a step;
    ``timed("reduce")`` for each gradient that is taken over, and for the end of each backward.
    """
    gatherer, reducer = runtime.gatherer, runtime.reducer
    for owner, names, phase in (
        (gatherer, ("acquire",), "gather"),
        (runtime, ("publish",), "gather"),
        (reducer, ("arrive", "end_backward"), "reduce"),
    ):
        for name in names:
            setattr(owner, name, _within(timed, phase, getattr(owner, name)))


def _within(timed: Callable[[str], AbstractContextManager[None]], phase: str, call: Callable[..., Any]) -> Any:
    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with timed(phase):
            return call(*args, **kwargs)

    return wrapped
