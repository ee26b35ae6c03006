"""Counts the memory of saved inputs by place, and times checkpointed functions."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import Variable

from zero._ranks.distributed import is_first_of_job


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Bytes of saved inputs of checkpointed functions on this rank."""

    device: int
    """In device memory now. Inputs that stay where they are count, too; others may hold them as well."""
    host: int
    files: int
    peak_device: int
    """The peak of ``device``."""
    peak_host: int
    peak_files: int
    arena: int
    """Size of the contiguous buffer, used or not."""
    num_allocations: int
    """Buffers or files that have been created for saved inputs so far."""


class ActivationUsage:
    """Bytes of saved inputs by place, now and at their peak."""

    def __init__(self) -> None:
        self._now = {"device": 0, "host": 0, "files": 0}
        self._peak = dict(self._now)
        self.dropped: deque[tuple[str, int]] = deque()
        """Place and bytes of counts whose objects are gone."""
        self.num_allocations = 0

    def count(self, place: str, nbytes: int) -> CountedBytes:
        """Count ``nbytes`` until the returned object is dropped."""
        self._subtract_dropped()
        self._now[place] += nbytes
        self._peak[place] = max(self._peak[place], self._now[place])
        return CountedBytes(self, place, nbytes)

    def _subtract_dropped(self) -> None:
        while self.dropped:
            place, nbytes = self.dropped.popleft()
            self._now[place] -= nbytes

    def report(self, arena_nbytes: int, num_allocations: int) -> ActivationMemory:
        """The counts, with those of an arena."""
        self._subtract_dropped()
        return ActivationMemory(
            **self._now,
            **{f"peak_{place}": nbytes for place, nbytes in self._peak.items()},
            arena=arena_nbytes,
            num_allocations=self.num_allocations + num_allocations,
        )


class CountedBytes:
    """Bytes that are counted as long as this object lives."""

    __slots__ = ("_nbytes", "_place", "_usage")

    def __init__(self, usage: ActivationUsage, place: str, nbytes: int) -> None:
        self._usage, self._place, self._nbytes = usage, place, nbytes

    def __del__(self) -> None:
        self._usage.dropped.append((self._place, self._nbytes))


logger = logging.getLogger("zero")


class CallTimes:
    """Times of the functions, summed from the end of one backward to the end of the next."""

    def __init__(self) -> None:
        self._seconds = {"forward": 0.0, "recomputation": 0.0}
        self._counts = dict.fromkeys(self._seconds, 0)
        self._backward_started: float | None = None

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """Add the time inside to ``kind``, "forward" or "recomputation"."""
        synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self._seconds[kind] += time.perf_counter() - started
            self._counts[kind] += 1

    def start_backward(self) -> None:
        """Called when backward needs a saved input: have the times logged at its end."""
        if self._backward_started is None and torch._C._current_graph_task_id() != -1:
            self._backward_started = time.perf_counter()
            # autograd calls it when the whole backward has ended; it may be queued only while one runs (checked above).
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        synchronize()
        assert self._backward_started is not None, "set by start_backward"
        seconds = time.perf_counter() - self._backward_started
        parts = [f"{self._counts[kind]} x {kind} {1e3 * self._seconds[kind]:.1f} ms" for kind in self._seconds]
        if is_first_of_job():
            logger.info("activation checkpoints: %s, backward %.1f ms", ", ".join(parts), 1e3 * seconds)
        self._backward_started = None
        for kind in self._seconds:
            self._seconds[kind], self._counts[kind] = 0.0, 0


def synchronize() -> None:
    """Wait for the GPU, if CUDA is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
