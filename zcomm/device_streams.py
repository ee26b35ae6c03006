"""The streams that a communicator over NCCL works on: CUDA's, or, under the emulated NCCL, threads of this process.

    CUDA    calls go on the current stream of the device; what is queued there later runs after them
    host    torch computes on CPU tensors at once, so the host is the stream: it waits before it reads what a call made

Invariants:
    D1  On the host, tensors of work that is queued stay alive until it is done: CUDA's allocator does that by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from zcomm import kernels
from zcomm.errors import CommunicationError
from zcomm.nccl_library import is_emulated
from zcomm.pending import Pending
from zcomm.streams import SideStreams

__all__ = ["DeviceStreams", "Lane", "device_streams", "on_device"]


class Lane(Protocol):
    """A stream, while work is queued on it."""

    address: int
    """As C++ takes it."""

    def ended(self) -> Pending:
        """What ends with all that was queued."""


class DeviceStreams(Protocol):
    """Of one communicator."""

    def calls(self, device: torch.device, tensors: Sequence[Tensor]) -> AbstractContextManager[Lane]:
        """The stream that the caller computes on; for work on ``tensors``."""

    def beside(self, hop: int, device: torch.device, tensors: Sequence[Tensor]) -> AbstractContextManager[Lane]:
        """The stream of the exchanges of hop number ``hop``, after what the caller has computed."""

    def is_captured(self) -> bool:
        """Whether the caller's stream is being captured into a graph."""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which ``device`` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_streams(native: Any, num_hops: int) -> DeviceStreams:
    """Those of the communicator ``native``."""
    return _HostStreams(native, num_hops) if is_emulated() else _CudaStreams(num_hops)


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
    def calls(self, device: torch.device, _: Sequence[Tensor]) -> Iterator[Lane]:
        yield _CudaLane(torch.cuda.current_stream(device), is_callers=True)

    @contextmanager
    def beside(self, hop: int, device: torch.device, tensors: Sequence[Tensor]) -> Iterator[Lane]:
        with self._sides[hop].after_current(device, tensors) as stream:
            yield _CudaLane(stream, is_callers=False)

    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


class _HostLane:
    def __init__(self, stream: Any, streams: _HostStreams, tensors: Sequence[Tensor]) -> None:
        self.address: int = stream.address
        self._stream, self._streams, self._tensors = stream, streams, tensors

    def ended(self) -> Pending:
        end = _HostEnd(self._stream.record(), self._streams, self._tensors)
        self._streams.under_way.add(end)
        return end


class _HostEnd:
    """Work that the host waits for. It ends in any case: the communicator aborts what is late."""

    def __init__(self, event: Any, streams: _HostStreams, tensors: Sequence[Tensor]) -> None:
        self._event, self._streams, self._tensors = event, streams, tuple(tensors)

    def wait(self) -> None:
        self._event.wait()
        self._streams.under_way.discard(self)
        try:
            self._streams.native.check()
        except RuntimeError as error:
            raise CommunicationError(f"over NCCL: {error}") from error

    def is_completed(self) -> bool:
        return bool(self._event.is_done())


class _HostStreams:
    def __init__(self, native: Any, num_hops: int) -> None:
        self.native = native
        self.under_way: set[_HostEnd] = set()
        self._calls, *self._sides = (kernels.native().HostStream() for _ in range(1 + num_hops))

    def calls(self, _: torch.device, tensors: Sequence[Tensor]) -> AbstractContextManager[Lane]:
        return self._lane(self._calls, tensors)

    def beside(self, hop: int, _: torch.device, tensors: Sequence[Tensor]) -> AbstractContextManager[Lane]:
        return self._lane(self._sides[hop], tensors)

    def _lane(self, stream: Any, tensors: Sequence[Tensor]) -> AbstractContextManager[Lane]:
        self.under_way = {end for end in self.under_way if not end.is_completed()}
        return nullcontext(_HostLane(stream, self, tensors))

    def is_captured(self) -> bool:
        return False
