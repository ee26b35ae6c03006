"""The streams that a communicator over NCCL works on: CUDA's, or, under the emulated NCCL, threads of this process.

    CUDA    calls go on the current stream of the device; what is queued there later runs after them
    host    torch computes on CPU tensors at once, so the host is the stream: it waits before it reads what a call made

Invariants:
    D1  On the host, tensors of work that is queued stay alive until it is done: CUDA's allocator does that by itself.
    D2  The host waits for the oldest work of a stream first, and :mod:`zcomm._transport.deadlock_watch` sees for which: it ends once all
        ranks have queued theirs of that number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from zcomm._base.pending import Pending
from zcomm._kernels import kernels
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog
from zcomm._transport.nccl_library import is_emulated
from zcomm._transport.streams import SideStreams
from zcomm.errors import CommunicationError, DivergedError

VERDICT_S = 5.0
"""How long a rank whose communicator has failed waits to be told that the ranks make different calls."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedOnStream:
    """What was queued on one stream of a communicator: the same on all its ranks that make the same calls."""

    ledger: CollectiveLog
    ranks: tuple[int, ...]
    """Of torch.distributed, that an exchange of it needs."""
    is_watched: bool
    """Whether ranks that wait for one another in it are found out (:mod:`zcomm._transport.deadlock_watch`)."""


class Lane(Protocol):
    """A stream, while work is queued on it."""

    address: int
    """As C++ takes it."""

    def ended(self) -> Pending:
        """What ends with all that was queued."""


class DeviceStreams(Protocol):
    """Of one communicator."""

    def calls(
        self, device: torch.device, tensors: Sequence[Tensor], call: CollectiveCall
    ) -> AbstractContextManager[Lane]:
        """The stream that the caller computes on; for ``call``, work on ``tensors``."""

    def beside(
        self, hop: int, device: torch.device, tensors: Sequence[Tensor], call: CollectiveCall
    ) -> AbstractContextManager[Lane]:
        """The stream of the exchanges of hop number ``hop``, after what the caller has computed."""

    def is_captured(self) -> bool:
        """Whether the caller's stream is being captured into a graph."""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which ``device`` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_streams(native: Any, queued: Sequence[QueuedOnStream]) -> DeviceStreams:
    """Those of the communicator ``native``; ``queued``: of its calls, and of exchanges of each hop."""
    return _HostStreams(native, queued) if is_emulated() else _CudaStreams(len(queued) - 1)


class _CudaLane:
    def __init__(self, stream: torch.cuda.Stream, *, is_callers: bool) -> None:
        self.address = stream.cuda_stream
        self._stream, self._is_callers = stream, is_callers

    def ended(self) -> Pending:
        if self._is_callers:
            return _InOrder()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEnd(event, self._stream.device)


class _InOrder:
    """Work on the caller's stream, which later work of the caller comes after anyway."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class _CudaEnd:
    """An exchange that later work on the current stream of its device comes after."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _CudaStreams:
    def __init__(self, num_hops: int) -> None:
        self._sides = tuple(SideStreams() for _ in range(num_hops))

    @contextmanager
    def calls(self, device: torch.device, _: Sequence[Tensor], _call: CollectiveCall) -> Iterator[Lane]:
        yield _CudaLane(torch.cuda.current_stream(device), is_callers=True)

    @contextmanager
    def beside(
        self, hop: int, device: torch.device, tensors: Sequence[Tensor], _call: CollectiveCall
    ) -> Iterator[Lane]:
        with self._sides[hop].after_current(device, tensors) as stream:
            yield _CudaLane(stream, is_callers=False)

    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class _HostEnd:
    """Work that the host waits for. It ends in any case: the communicator aborts what is late."""

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
        """This thread waits inside for this work."""
        return self._stream.queued.ledger.waiting(self._number, self._stream.queued.ranks)

    def is_completed(self) -> bool:
        return bool(self._event.is_done())


class _HostLane:
    def __init__(self, stream: _HostStream, number: int, tensors: Sequence[Tensor]) -> None:
        self.address = stream.address
        self._stream, self._number, self._tensors = stream, number, tensors

    def ended(self) -> Pending:
        return self._stream.end_of(self._number, self._tensors)


class _HostStream:
    """One stream, and what is under way there."""

    def __init__(self, native: Any, queued: QueuedOnStream) -> None:
        self.queued = queued
        self._native = native
        self._stream = kernels.native().HostStream()
        self.address: int = self._stream.address
        self._ends: deque[_HostEnd] = deque()

    @contextmanager
    def queueing(self, tensors: Sequence[Tensor], call: CollectiveCall) -> Iterator[Lane]:
        """``call`` is queued inside, which may wait for what is under way."""
        while self._ends and self._ends[0].is_completed():
            self._ends.popleft()
        oldest = self._ends[0].waiting() if self._ends else nullcontext()
        number = self.queued.ledger.start(call)
        with oldest:
            try:
                yield _HostLane(self, number, tensors)
            except CommunicationError as error:
                self._fail(number, error)

    def end_of(self, number: int, tensors: Sequence[Tensor]) -> Pending:
        """What ends with work ``number``, which has just been queued."""
        end = _HostEnd(self._stream.record(), self, number, tensors)
        self._ends.append(end)
        return end

    def up_to(self, last: _HostEnd) -> list[_HostEnd]:
        """What is under way that ends before ``last``, and that, in order."""
        ends = list(self._ends)
        return ends[: ends.index(last) + 1] if last in ends else [last]

    def forget(self, end: _HostEnd) -> None:
        """It is done."""
        if end in self._ends:
            self._ends.remove(end)

    def check(self, number: int) -> None:
        """Raise what has gone wrong with the communicator, seen by work of that number."""
        try:
            self._native.check()
        except RuntimeError as error:
            self._fail(number, CommunicationError(f"over NCCL: {error}"))

    def _fail(self, number: int, error: CommunicationError) -> NoReturn:
        """Raise ``error``; or, where ranks make different calls, or have left, DivergedError, which says so."""
        ledger, end = self.queued.ledger, time.monotonic() + VERDICT_S * self.queued.is_watched
        with ledger.waiting(number, self.queued.ranks):
            while time.monotonic() < end and ledger.last_broken < number:
                if reason := ledger.lost():
                    raise DivergedError(reason) from error
                time.sleep(0.1)
            raise error


class _HostStreams:
    def __init__(self, native: Any, queued: Sequence[QueuedOnStream]) -> None:
        self._calls, *self._sides = (_HostStream(native, each) for each in queued)

    def calls(self, _: torch.device, tensors: Sequence[Tensor], call: CollectiveCall) -> AbstractContextManager[Lane]:
        return self._calls.queueing(tensors, call)

    def beside(
        self, hop: int, _: torch.device, tensors: Sequence[Tensor], call: CollectiveCall
    ) -> AbstractContextManager[Lane]:
        return self._sides[hop].queueing(tensors, call)

    def is_captured(self) -> bool:
        return False
