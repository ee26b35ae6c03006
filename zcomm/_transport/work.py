"""Running a collective's steps: at once, up to the first exchange, or behind others in a thread.

A collective is a generator that yields what it has to wait for, and keeps in its frame the tensors that must stay
alive. Who drives it:

    sync                     the caller, to the end
    async, one exchange      the caller: started at once, finished in ``wait()``
    async, more, on a CPU    a thread of the Topology, in the order of the calls: every exchange overlaps computation
    sync, CUDA               the caller, to the end: waiting orders streams, it does not block the host
    async, CUDA              the same on a stream of its own (:mod:`zcomm._transport.streams`)

Invariants:
    W1  Over the groups of one Topology, exchanges start in the order of the calls, whoever drives them: while the
        thread has work, every later call queues behind it.
    W2  The thread ends with the process, and does not keep its Topology alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm._base.pending import Pending, ends_within
from zcomm._transport.call_context import Context, entered, here
from zcomm._transport.streams import SideStreams
from zcomm.errors import StateError

Steps = Generator[Pending | None, None, None]
OnEnd = Callable[[BaseException | None], None]
"""Called with what went wrong, or None, when a collective has ended."""


class Work:
    """A collective under way, as ``async_op=True`` returns it.

    ``wait()`` returns when the output may be read, and raises what went wrong; any number of times. Without it
    the output may never be written.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self._pending: Pending | None = None
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._event: torch.cuda.Event | None = None
        self._context = here()

    def start(self) -> None:
        """Run up to the first exchange."""
        with self._lock:
            self._advance(self._context._replace(goes_on=True))

    def finish(self) -> None:
        """Run to the end; on CUDA as far as the host is concerned."""
        with self._lock:
            while self._steps is not None:
                try:
                    if self._pending is not None:
                        self._pending.wait()
                except BaseException as error:
                    self._fail(error)
                    raise
                self._advance()

    def finish_beside(self, streams: SideStreams, tensors: Sequence[Tensor]) -> None:
        """Run to the end on the side stream of the first of ``tensors``, which are what the steps read and write."""
        with streams.after_current(tensors[0].device, tensors) as stream:
            self.finish()
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def _advance(self, context: Context | None = None) -> None:
        """Run up to the next exchange, or to the end."""
        assert self._steps is not None, "a finished collective was advanced"
        try:
            with torch.no_grad(), entered(context or self._context):
                while (pending := next(self._steps)) is None:  # nothing was exchanged: nothing is to be waited for
                    pass
                self._pending = pending
        except StopIteration:
            self._steps = self._pending = None
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._steps, self._pending, self._error = None, None, error

    def wait(self) -> None:
        """Finish. On CUDA the current stream waits, not the host."""
        self.finish()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.wait()

    def is_completed(self) -> bool:
        """Whether ``wait()`` would return without waiting for other ranks, as far as is known; true on CUDA.

        gloo does not tell of sends and receives: an all-gather that the caller drives is completed by ``wait()``.
        """
        return self._steps is None or (self._pending is not None and self._pending.is_completed())

    def completes_within(self, seconds: float) -> bool:
        """Whether it is completed that soon, as :meth:`is_completed` knows; errors are left to :meth:`wait`."""
        if self._steps is None:
            return True
        return self._pending is not None and ends_within(self._pending, seconds)


class _QueuedCollective(Work):
    """A collective that a thread drives."""

    def __init__(self, steps: Steps, waits: set[int], on_end: OnEnd | None = None) -> None:
        super().__init__(steps)
        self._waits, self._on_end = waits, on_end
        self.done = threading.Event()
        self.thread: threading.Thread | None = None

    def drive(self) -> None:
        try:
            self.finish()
        except BaseException as error:  # handed to whoever waits
            self._fail(error)
        self._end()

    def cancel(self, error: Exception) -> None:
        self._fail(error)
        self._end()

    def _end(self) -> None:
        self.done.set()
        if self._on_end is not None:
            self._on_end(self._error)

    def wait(self) -> None:
        if threading.current_thread() is self.thread and not self.done.is_set():
            raise StateError("the thread that drives a collective cannot wait for a later one of the same Topology")
        self.wait_until_done()
        if self._error is not None:
            raise self._error

    def wait_until_done(self) -> None:
        if self.done.is_set():
            return
        self._waits.add(threading.get_ident())
        self.done.wait()
        self._waits.discard(threading.get_ident())

    def is_completed(self) -> bool:
        return self.done.is_set()

    def completes_within(self, seconds: float) -> bool:
        return self.done.wait(seconds)


class Link(NamedTuple):
    """A kind of link between ranks."""

    latency_s: float
    bytes_per_s: float


class WorkQueue:
    """Collectives of one Topology, driven one after the other by one thread, which is started when first needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_QueuedCollective | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _QueuedCollective | None = None
        self._is_closed = False
        self.waits: set[int] = set()
        """Threads that wait for this one's."""
        self.side = SideStreams()
        self.links: tuple[Link, ...] = ()
        """What the ranks have agreed on of the Topology's links (:mod:`zcomm._collectives.auto_format`)."""

    @property
    def thread_id(self) -> int | None:
        """Of the thread, if it has been started."""
        return None if self._thread is None else self._thread.ident

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted has finished."""
        if self._last is not None and self._last.is_completed():
            self._last = None  # and with it the tensors of its caller
        return self._last is None

    def check_open(self) -> None:
        """Raise StateError after :meth:`close`."""
        if self._is_closed:
            raise StateError("the Topology is closed: make another, or use it before close()")

    def submit(self, steps: Steps, on_end: OnEnd | None = None) -> Work:
        """Run ``steps`` after everything submitted before; ``on_end`` is then called, in the thread."""
        self.check_open()
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="zcomm", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        work = self._last = _QueuedCollective(steps, self.waits, on_end)
        work.thread = self._thread
        self._queue.put(work)
        return work

    def drain(self) -> None:
        """Wait for everything submitted; errors are left to whoever waits for the collective."""
        if not self.is_idle and self._last is not None:
            self._last.wait_until_done()

    def cancel_all(self, error: Exception) -> None:
        """What waits for the thread fails with ``error``, and never starts."""
        with suppress(Empty):
            while (work := self._queue.get_nowait()) is not None:
                work.cancel(error)
            self._queue.put(None)

    def close(self) -> None:
        """Finish what was submitted and end the thread. Any number of times."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _serve(queue: SimpleQueue[_QueuedCollective | None]) -> None:
    while (work := queue.get()) is not None:
        work.drive()
        del work  # the caller's tensors must not stay until the next collective


def nothing() -> Steps:
    """The steps of a collective on empty tensors."""
    yield None


_OF_NO_TOPOLOGY = SideStreams()


def run(steps: Steps, *tensors: Tensor, async_op: bool, queue: WorkQueue | None, num_exchanges: int = 1) -> Work | None:
    """Drive ``steps``, which read and write ``tensors`` on the first one's device; returns a Work if ``async_op``.

    ``queue`` is the Topology's, if there is one.
    """
    device = tensors[0].device
    if queue is not None:
        queue.check_open()
    work = Work(steps)
    if device.type != "cpu":
        if async_op and device.type == "cuda":
            work.finish_beside(_OF_NO_TOPOLOGY if queue is None else queue.side, tensors)
        else:
            work.finish()
    elif queue is not None and (not queue.is_idle or (async_op and num_exchanges > 1)):
        work = queue.submit(steps)
    elif async_op:
        work.start()
    if async_op:
        return work
    work.wait()
    return None


def run_then(steps: Steps, on_end: OnEnd, *, device: torch.device, queue: WorkQueue) -> None:
    """Drive ``steps`` and call ``on_end``: from the thread of ``queue``, or at once where waiting only orders streams.

    On CUDA everything happens on the current stream; ``on_end`` can record it.
    """
    if device.type == "cpu":
        queue.submit(steps, on_end)
        return
    queue.check_open()
    error: BaseException | None = None
    try:
        Work(steps).finish()
    except BaseException as raised:  # handed to whoever waits
        error = raised
    on_end(error)
