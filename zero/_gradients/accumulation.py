"""Which backward of a step runs: whether it reduces its gradients, and whether it is the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zcomm._base.rank_context import PerRank


class ScaledBackwards:
    """Counts the running backwards whose loss is divided by the accumulation steps already, for all models in it."""

    def __init__(self) -> None:
        self.num_running = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


SCALED_BACKWARDS = PerRank(ScaledBackwards)


class Accumulation:
    """Counts the backwards of a step.

    Args:
        num_backwards: Backwards that a step has, unless :attr:`boundary` says which one is the last.
        reduces_each: Whether backwards before the last reduce, too.
    """

    def __init__(self, num_backwards: int, *, reduces_each: bool) -> None:
        self._num_backwards, self._reduces_each = num_backwards, reduces_each
        self.num_started = 0
        """Backwards of this step so far."""
        self.num_aborted = 0
        """Steps whose gradients were dropped because an exception or interrupt ended a backward."""
        self.boundary: bool | None = None
        """Whether this backward is the last of a step, if the engine or the user sets it; None: counted here."""
        self.is_deferred = False
        """Whether backwards reduce nothing: within :meth:`no_sync`."""
        self.holds_unreduced = False
        """Whether any rank may hold unreduced gradients; the same on every rank."""

    @property
    def is_boundary(self) -> bool:
        """Whether the running or last backward completes the gradient of a step."""
        return self.num_started % self._num_backwards == 0 if self.boundary is None else self.boundary

    def start_backward(self) -> bool:
        """A backward starts; returns whether it reduces."""
        self.num_started += 1
        reduces = not self.is_deferred and (self.is_boundary or self._reduces_each)
        self.holds_unreduced |= not reduces
        return reduces

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards reduce nothing."""
        before, self.is_deferred = self.is_deferred, True
        # Set on every rank, also where no backward runs inside: the next reduction must be the same call on all ranks.
        self.holds_unreduced = True
        try:
            yield
        finally:
            self.is_deferred = before
            self.holds_unreduced = True
