"""Running a collective's steps: at once, up to the first exchange, or behind others in a thread.

A collective is a generator that yields a ``torch.distributed.Work`` wherever it has to wait, and keeps in its frame the
tensors that must stay alive. Who drives it:

    sync                     the caller, to the end
    async, one hop           the caller: started at once, finished in ``wait()``
    async, two hops, CPU     a thread of the Topology, in the order of the calls, so that both hops overlap computation
    CUDA                     the caller, to the end: waiting orders streams, it does not block the host
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import SimpleQueue

import torch
import torch.distributed as dist

from zcomm.errors import StateError

__all__ = ["Steps", "Work", "WorkQueue", "run"]

Steps = Generator[dist.Work | None, None, None]


class Work:
    """A collective under way. ``wait()`` returns when its output may be read; it raises what went wrong."""

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self._pending: dist.Work | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Run up to the first exchange."""
        self._advance()

    def _advance(self) -> bool:
        """Run up to the next exchange; False when there is none."""
        assert self._steps is not None, "a finished collective was advanced"
        try:
            with torch.no_grad():
                self._pending = next(self._steps)
        except BaseException as end:
            self._steps = None
            if not isinstance(end, StopIteration):
                raise
            return False
        return True

    def wait(self) -> None:
        """Finish. Any number of times."""
        with self._lock:
            while self._steps is not None:
                if self._pending is not None:
                    self._pending.wait()
                self._advance()

    def is_completed(self) -> bool:
        """Whether ``wait()`` would return at once."""
        return self._steps is None


class _Queued(Work):
    """A collective that a thread drives."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self.done = threading.Event()
        self.error: BaseException | None = None

    def drive(self) -> None:
        try:
            super().wait()
        except BaseException as error:  # handed to whoever waits
            self.error, self._steps = error, None
        self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.done.is_set()


class WorkQueue:
    """Collectives of one Topology, driven one after the other by one thread, which is started when first needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Queued | None = None

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted has finished."""
        return self._last is None or self._last.is_completed()

    def submit(self, steps: Steps) -> Work:
        """Run ``steps`` after everything submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="zcomm", daemon=True)
            self._thread.start()
        if threading.current_thread() is self._thread:
            raise StateError("a collective was started from inside another one of the same Topology")
        work = self._last = _Queued(steps)
        self._queue.put(work)
        return work

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.drive()

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def run(steps: Steps, *, async_op: bool, queue: WorkQueue | None, device: torch.device) -> Work | None:
    """Drive ``steps``; returns a Work if ``async_op``. ``queue``: the Topology's, for collectives of two hops."""
    if queue is not None and device.type == "cpu" and (async_op or not queue.is_idle):
        work = queue.submit(steps)
    else:
        work = Work(steps)
        work.start()
        if device.type != "cpu":
            work.wait()
    if async_op:
        return work
    work.wait()
    return None
