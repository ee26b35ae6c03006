"""The streams of a communicator over NCCL: CUDA streams, or threads of this process for the emulated NCCL.

    CUDA    calls go to the current stream of the device; work queued there later runs after them
    host    torch computes on CPU tensors immediately, so the host must wait before it reads a result

Invariants:
    H1  On the host, tensors of queued work are kept alive until it completes: another thread still writes to them. On
        CUDA the caching allocator does that (record_stream).
    H2  The host waits for the oldest work of a stream first and logs for which, so that the deadlock watch sees it.
        The work completes once all ranks have queued theirs of that number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from zcomm._base.pending import Pending
from zcomm._base.rank_context import clock
from zcomm._kernels import kernels
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog
from zcomm._transport.nccl_library import is_emulated
from zcomm._transport.work import SideStreams
from zcomm.errors import CommunicationError, DivergedError

DEADLOCK_REPORT_S = 5.0
"""How long a rank with a failed communicator waits for the deadlock watch's verdict, which is the better error."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedOnStream:
    """The log of one stream of a communicator: the same on all ranks that make the same calls."""

    log: CollectiveLog
    ranks: tuple[int, ...]
    """The global ranks that take part."""
    is_watched: bool
    """Whether the deadlock watch observes it."""


class StreamHandle(Protocol):
    """A stream on which work is being queued."""

    address: int
    """The stream as C++ takes it."""

    def completion(self) -> Pending:
        """Completes with all work queued so far."""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_streams(native: Any, queued: Sequence[QueuedOnStream]) -> DeviceStreams:
    """The streams of communicator ``native``; ``queued`` has the log of its calls, then that of each hop."""
    return _HostStreams(native, queued) if is_emulated() else _CudaStreams(len(queued) - 1)


class _CudaHandle:
    def __init__(self, stream: torch.cuda.Stream, *, is_callers: bool) -> None:
        self.address = stream.cuda_stream
        self._stream, self._is_callers = stream, is_callers

    def completion(self) -> Pending:
        if self._is_callers:
            return _InOrder()
        # An event, and not the stream: work that others queue there later must not be waited for.
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaCompletion(event, self._stream.device)


class _InOrder:
    """Work on the caller's own stream: later work there is ordered after it without any wait."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class _CudaCompletion:
    """Work on a side stream: ``wait()`` orders the current stream after it, without blocking the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device.index))

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _CudaStreams:
    """The streams of one communicator on GPUs."""

    def __init__(self, num_hops: int) -> None:
        self._sides = tuple(SideStreams() for _ in range(num_hops))

    @contextmanager
    def on_current(self, device: torch.device, _: Sequence[Tensor], _call: CollectiveCall) -> Iterator[StreamHandle]:
        """The stream that the caller computes on, to queue a call on tensors."""
        yield _CudaHandle(torch.cuda.current_stream(device.index), is_callers=True)

    @contextmanager
    def on_side(
        self, hop: int, device: torch.device, tensors: Sequence[Tensor], _call: CollectiveCall
    ) -> Iterator[StreamHandle]:
        """The side stream of hop number ``hop``, ordered after what the caller has computed."""
        with self._sides[hop].after_current(device, tensors) as stream:
            yield _CudaHandle(stream, is_callers=False)

    def is_captured(self) -> bool:
        """Whether the caller's stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()


class _HostCompletion:
    """Work that the host waits for. It always completes: the communicator aborts it after its timeout."""

    def __init__(self, event: Any, stream: _HostStream, number: int, tensors: Sequence[Tensor]) -> None:
        self._event, self._stream, self._number, self._tensors = event, stream, number, tuple(tensors)

    def wait(self) -> None:
        for end in self._stream.up_to(self):
            end._wait_alone()

    def _wait_alone(self) -> None:
        with self.waiting():
            self._event.wait()
            self._stream.forget(self)
            self._stream.check(self._number)

    def waiting(self) -> AbstractContextManager[None]:
        return self._stream.queued.log.waiting(self._number, self._stream.queued.ranks)

    def is_completed(self) -> bool:
        return bool(self._event.is_done())


class _HostHandle:
    def __init__(self, stream: _HostStream, number: int, tensors: Sequence[Tensor]) -> None:
        self.address = stream.address
        self._stream, self._number, self._tensors = stream, number, tensors

    def completion(self) -> Pending:
        return self._stream.completion_of(self._number, self._tensors)


class _HostStream:
    """One stream, and its work in flight."""

    def __init__(self, native: Any, queued: QueuedOnStream) -> None:
        self.queued = queued
        self._native = native
        self._stream = kernels.native().HostStream()
        self.address: int = self._stream.address
        self._in_flight: deque[_HostCompletion] = deque()

    @contextmanager
    def queueing(self, tensors: Sequence[Tensor], call: CollectiveCall) -> Iterator[StreamHandle]:
        """A context that queues ``call``. Queueing may itself wait for the oldest work in flight, so that is logged."""
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft()
        oldest = self._in_flight[0].waiting() if self._in_flight else nullcontext()
        number = self.queued.log.start(call)
        with oldest:
            try:
                yield _HostHandle(self, number, tensors)
            except CommunicationError as error:
                self._fail(number, error)

    def completion_of(self, number: int, tensors: Sequence[Tensor]) -> Pending:
        """The completion of work ``number``, which has just been queued."""
        end = _HostCompletion(self._stream.record(), self, number, tensors)
        self._in_flight.append(end)
        return end

    def up_to(self, last: _HostCompletion) -> list[_HostCompletion]:
        """The work in flight up to and including ``last``, in order."""
        ends = list(self._in_flight)
        return ends[: ends.index(last) + 1] if last in ends else [last]

    def forget(self, end: _HostCompletion) -> None:
        if end in self._in_flight:
            self._in_flight.remove(end)

    def check(self, number: int) -> None:
        """Raise the communicator's error, if it has failed, for work ``number``."""
        try:
            self._native.check()
        except RuntimeError as error:
            self._fail(number, CommunicationError(f"over NCCL: {error}"))

    def _fail(self, number: int, error: CommunicationError) -> NoReturn:
        """Raise ``error``, or DivergedError if the ranks make different calls or some have left."""
        log, end = self.queued.log, clock().monotonic() + DEADLOCK_REPORT_S * self.queued.is_watched
        with log.waiting(number, self.queued.ranks):
            while clock().monotonic() < end and log.last_broken < number:
                if reason := log.departed():
                    raise DivergedError(reason) from error
                clock().sleep(0.1)
            raise error


class _HostStreams:
    """The streams of one communicator over the emulated NCCL: as :class:`_CudaStreams`."""

    def __init__(self, native: Any, queued: Sequence[QueuedOnStream]) -> None:
        self._calls, *self._sides = (_HostStream(native, each) for each in queued)

    def on_current(
        self, _: torch.device, tensors: Sequence[Tensor], call: CollectiveCall
    ) -> AbstractContextManager[StreamHandle]:
        return self._calls.queueing(tensors, call)

    def on_side(
        self, hop: int, _: torch.device, tensors: Sequence[Tensor], call: CollectiveCall
    ) -> AbstractContextManager[StreamHandle]:
        return self._sides[hop].queueing(tensors, call)

    def is_captured(self) -> bool:
        return False


DeviceStreams = _CudaStreams | _HostStreams
