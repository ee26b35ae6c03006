"""Running a collective's steps: synchronously, up to the first exchange, or in a queue's thread.

A collective is a generator that yields the exchanges to wait for. Its frame holds the tensors that must stay alive.
What drives it:

    sync                     the caller, to the end
    async, one exchange      the caller: started at once, finished in ``wait()``
    async, more, on a CPU    a thread of the Topology, in the order of the calls: every exchange overlaps computation
    sync, CUDA               the caller, to the end: waiting orders streams, and does not block the host
    async, CUDA              the caller, on a side stream, see below

Invariants:
    W1  Over the groups of one Topology, exchanges start in the order of the calls, whatever drives them: while the
        thread has work, every later call queues behind it. Otherwise ranks would start them in different orders.
    W2  The thread ends with the process, and does not keep its Topology alive.

CUDA side streams: asynchronous collectives run on them and overlap the computation.

    current stream   compute ─┬─ compute ───────────────────┬─ compute on the output
    side stream               └─ quantize, exchange, decode ─┘
                           the call                      wait()

Invariants:
    P1  A collective starts after everything that was on the current stream when it was called. Without the wait it
        would read inputs that are not yet computed (tests/zcomm/test_streams.py).
    P2  The caller may free the tensors of a collective before it completes: record_stream tells the allocator not to
        reuse their memory until the side stream has passed this point. Writing to them still needs ``wait()``.
    P3  The side stream has a high priority: a collective's small kernels run as soon as thread blocks of the
        computation finish, and not after all kernels that are already queued.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm._base.daemon_threads import start_daemon
from zcomm._base.pending import Pending, ends_within
from zcomm._base.rank_context import threads
from zcomm._transport.call_context import Context, current_context, use_context
from zcomm._transport.collective_log import has_lost_a_rank
from zcomm.errors import StateError


class _Selected:
    """torch.cuda.stream() for a stream of the current device, which looks that device up several times."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._stream, self._before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


class SideStreams:
    """One stream for each device, created at the first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after_current(self, device: torch.device, tensors: Sequence[Tensor]) -> Iterator[torch.cuda.Stream]:
        """A context on the side stream of CUDA ``device``, ordered after the current one, for work on ``tensors``."""
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        current = torch.cuda.current_stream(device.index)  # torch takes long to find the index of a device
        stream.wait_stream(current)  # P1: streams are not ordered by default
        is_current = torch.cuda.current_device() == device.index
        try:
            with _Selected(stream, current) if is_current else torch.cuda.stream(stream):
                yield stream
        finally:  # also after an error: kernels that were queued before it still use the tensors (P2)
            for tensor in tensors:
                if tensor.device == device:
                    tensor.record_stream(stream)


Steps = Generator[Pending | None, None, None]
OnEnd = Callable[[BaseException | None], None]
"""Called with the error, or None, when a collective is complete."""


class _NoGrad:
    """torch.no_grad(), which takes a tenth of a small call."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


class Work:
    """A collective in flight, as returned with ``async_op=True``.

    ``wait()`` returns when the output may be read, or raises the error; it may be called repeatedly. Without it the
    output may never be written.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps | None = steps
        self._pending: Pending | None = None
        self._error: BaseException | None = None
        self._lock = threads().RLock()
        self._event: torch.cuda.Event | None = None
        self._context = current_context()

    def start(self) -> None:
        """Run up to the first exchange."""
        with self._lock:
            self._advance(self._context._replace(overlaps=not self._context.waits_next))

    def finish(self) -> None:
        """Run to the end. On CUDA all work is queued then, but not complete."""
        with self._lock:
            while self._steps is not None:
                try:
                    if self._pending is not None:
                        self._pending.wait()
                except BaseException as error:
                    self._fail(error)
                    raise
                self._advance()

    def finish_on_side(self, streams: SideStreams, tensors: Sequence[Tensor]) -> None:
        """Run to the end on the side stream of the first tensor's device; the steps read and write ``tensors``."""
        with streams.after_current(tensors[0].device, tensors) as stream:
            steps, self._steps = self._steps, None
            assert steps is not None, "a finished collective was run"
            try:
                _run_all(steps)
            except BaseException as error:
                self._fail(error)
                raise
            # Recorded once all steps are queued: wait() orders the caller's stream after it.
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def _advance(self, context: Context | None = None) -> None:
        """Run up to the next exchange, or to the end."""
        assert self._steps is not None, "a finished collective was advanced"
        try:
            with _NoGrad(), use_context(context or self._context):
                while (pending := next(self._steps)) is None:  # no exchange in this step
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
        """Finish the collective. On CUDA the current stream waits, not the host."""
        self.finish()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(torch.cuda.current_device()))

    def abandon(self) -> None:
        """As :meth:`wait`, but start no further exchange that other ranks must join. The output may be undefined."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether ``wait()`` is known to return without waiting for other ranks. Always true on CUDA.

        gloo has no test for sends and receives: a collective that the caller drives is completed only by ``wait()``.
        """
        return self._steps is None or (self._pending is not None and self._pending.is_completed())

    def completes_within(self, seconds: float) -> bool:
        """Whether :meth:`is_completed` becomes true within ``seconds``. Errors are raised by :meth:`wait`."""
        if self._steps is None:
            return True
        return self._pending is not None and ends_within(self._pending, seconds)


class WorkThen(Work):
    """``work``, and then a call of ``then`` in the thread that waits for it first.

    ``then`` may be a collective. So ranks wait for such works in the same order, and call no other collective between
    two such waits that others do not.
    """

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        super().__init__(nothing())
        self._work, self._then = work, [then]

    def wait(self) -> None:
        with self._lock:
            self._work.wait()
            try:
                while self._then:
                    self._then.pop()()
            except BaseException as error:
                self._error = error
            if self._error is not None:
                raise self._error

    def abandon(self) -> None:
        self._then.clear()
        self._work.abandon()

    def is_completed(self) -> bool:
        """Whether ``work`` is; ``then`` may wait for other ranks."""
        return self._work.is_completed()

    def completes_within(self, seconds: float) -> bool:
        return self._work.completes_within(seconds)


class _QueuedCollective(Work):
    """A collective driven by a queue's thread."""

    def __init__(self, steps: Steps, waits: set[int], on_end: OnEnd | None = None) -> None:
        super().__init__(steps)
        self._waits, self._on_end = waits, on_end
        self.done = threads().Event()
        self.thread: threading.Thread | None = None

    def drive(self) -> BaseException | None:
        """Run it; returns its error, which wait() raises."""
        with suppress(BaseException):  # raised in wait()
            self.finish()
        self._end()
        return self._error

    def cancel(self, error: BaseException) -> None:
        """End it with ``error``; it was taken out of its queue and has not started."""
        self._fail(error)
        self._end()

    def _end(self) -> None:
        self.done.set()
        if self._on_end is not None:
            self._on_end(self._error)

    def wait(self) -> None:
        if threading.current_thread() is self.thread and not self.done.is_set():
            # It would wait for itself.
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
    """Measured latency and rate of a link class."""

    latency_s: float
    bytes_per_s: float


class WorkQueue:
    """Collectives of one Topology, driven in order by one thread, which is started at the first submit."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_QueuedCollective | None] = threads().SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _QueuedCollective | None = None
        self._is_closed = False
        self.waits: set[int] = set()
        """Idents of threads that wait for a queued collective; read by the deadlock watch."""
        self.side = SideStreams()
        self.links: tuple[Link, ...] = ()
        """The Topology's links on which the ranks have agreed (:mod:`zcomm._collectives.auto_format`)."""

    @property
    def thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    @property
    def is_idle(self) -> bool:
        """Whether everything submitted is complete."""
        if self._last is not None and self._last.is_completed():
            self._last = None  # it holds its caller's tensors
        return self._last is None

    def check_open(self) -> None:
        """Raise StateError if :meth:`close` was called."""
        if self._is_closed:
            raise StateError("the Topology is closed: make another, or use it before close()")

    def submit(self, steps: Steps, on_end: OnEnd | None = None) -> Work:
        """Run ``steps`` after everything submitted before, then call ``on_end``, both in the thread."""
        self.check_open()
        if self._thread is None or not self._thread.is_alive():  # at exit it ends before handlers of the program
            self._thread = start_daemon(partial(_serve, self._queue), "zcomm", partial(self._queue.put, None))
            weakref.finalize(self, self._queue.put, None)  # W2: the thread holds the queue, not this object
        work = self._last = _QueuedCollective(steps, self.waits, on_end)
        work.thread = self._thread
        self._queue.put(work)
        return work

    def drain(self) -> None:
        """Wait for everything submitted. Errors are raised by the ``wait()`` of each collective."""
        if not self.is_idle and self._last is not None:
            self._last.wait_until_done()

    def take_all(self) -> list[_QueuedCollective]:
        """Take the collectives that have not started yet out of the queue; the caller must cancel each."""
        return _take_all(self._queue)

    def close(self) -> None:
        """Finish everything submitted and end the thread. May be called repeatedly."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _serve(queue: SimpleQueue[_QueuedCollective | None]) -> None:
    while (work := queue.get()) is not None:
        error = work.drive()
        if error is not None and has_lost_a_rank(error):
            # Ranks that lost it in different exchanges would wait for each other in those that follow, and close().
            _cancel_all(queue, error)
        del work, error  # or the caller's tensors and route would stay alive until the next collective


def _cancel_all(queue: SimpleQueue[_QueuedCollective | None], error: BaseException) -> None:
    for work in _take_all(queue):
        work.cancel(type(error)(*error.args))  # one for each: an error keeps the frames in which it was raised


def _take_all(queue: SimpleQueue[_QueuedCollective | None]) -> list[_QueuedCollective]:
    taken: list[_QueuedCollective] = []
    with suppress(Empty):
        while (work := queue.get_nowait()) is not None:
            taken.append(work)
        queue.put(None)  # the loop took the request to end: put it back
    return taken


def nothing() -> Steps:
    """The steps of a collective on empty tensors."""
    yield None


def _run_all(steps: Steps) -> None:
    """Run ``steps`` to the end in the caller."""
    try:
        with _NoGrad():
            for pending in steps:
                if pending is not None:
                    pending.wait()
    finally:
        steps.close()  # after a failed wait: whatever the steps do on an error is done before the caller sees it


_OF_NO_TOPOLOGY = SideStreams()


def run(steps: Steps, *tensors: Tensor, async_op: bool, queue: WorkQueue | None, num_exchanges: int = 1) -> Work | None:
    """Run ``steps``, which read and write ``tensors``, all on one device. Returns a Work if ``async_op``.

    ``queue`` is the Topology's; None for a ProcessGroup.
    """
    device = tensors[0].device
    if queue is not None:
        queue.check_open()
    if not async_op and (device.type != "cpu" or queue is None or queue.is_idle):
        _run_all(steps)
        return None
    work = Work(steps)
    if device.type != "cpu":
        if async_op and device.type == "cuda":
            work.finish_on_side(_OF_NO_TOPOLOGY if queue is None else queue.side, tensors)
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
    """Run ``steps``, then call ``on_end``: on a CPU in the thread of ``queue``, on CUDA in the caller.

    On CUDA everything is queued on the current stream, and ``on_end`` can record an event there.
    """
    if device.type == "cpu":
        queue.submit(steps, on_end)
        return
    queue.check_open()
    error: BaseException | None = None
    try:
        Work(steps).finish()
    except BaseException as raised:  # for on_end
        error = raised
    on_end(error)
