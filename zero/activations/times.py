"""Times of checkpointed functions, logged after every backward (``profile``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import Variable

from zero.notices import is_first_of_job

__all__ = ["Times", "synchronize"]

logger = logging.getLogger("zero")


class Times:
    """Adds up, from one backward's end to the next."""

    def __init__(self) -> None:
        self._seconds = {"forward": 0.0, "recomputation": 0.0}
        self._counts = dict.fromkeys(self._seconds, 0)
        self._backward_started: float | None = None

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Add what happens inside to ``kind``, "forward" or "recomputation"."""
        synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self._seconds[kind] += time.perf_counter() - started
            self._counts[kind] += 1

    def begin_backward(self) -> None:
        """A backward asks for saved inputs: log when it has ended."""
        if self._backward_started is None and torch._C._current_graph_task_id() != -1:
            self._backward_started = time.perf_counter()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        synchronize()
        assert self._backward_started is not None, "a backward that ends has begun"
        seconds = time.perf_counter() - self._backward_started
        parts = [f"{self._counts[kind]} x {kind} {1e3 * self._seconds[kind]:.1f} ms" for kind in self._seconds]
        if is_first_of_job():
            logger.info("activation checkpoints: %s, backward %.1f ms", ", ".join(parts), 1e3 * seconds)
        self._backward_started = None
        for kind in self._seconds:
            self._seconds[kind], self._counts[kind] = 0.0, 0


def synchronize() -> None:
    """Wait for the device, if there is one that works on its own."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
