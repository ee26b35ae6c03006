"""Copies between device and host memory, on a stream of their own where there is CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from zero._storage.copy_stream import CopyStream


class DeviceCopy:
    """A copy in flight, and its result."""

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor, event: torch.cuda.Event | None) -> None:
        self._tensor, self._event = tensor, event

    def wait(self) -> Tensor:
        """The result; the current stream waits for the copy, the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
        return self._tensor


class Copies:
    """All copies of one device, on one stream and so in one order.

    With a stream for each direction, a buffer could be filled again before it was read: an arena reuses host memory as
    soon as its slot is dropped, when the copy out of it may only be queued.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, CopyStream] = {}

    def to_host(self, values: Tensor, host: Tensor) -> None:
        """Start copying ``values`` to ``host``. Until it ends ``values`` may be freed, but not changed."""
        stream = self._stream_of(values.device)
        with stream.on_stream():
            host.copy_(values, non_blocking=values.is_cuda)
        stream.uses(values)  # or the allocator would reuse their memory before the copy has read it

    def to_device(self, host: Tensor, device: torch.device) -> DeviceCopy:
        """Start copying ``host`` to ``device``, after all copies that were started before."""
        if device.type != "cuda":
            return DeviceCopy(host.data.to(device), None)
        values, stream = torch.empty_like(host, device=device), self._stream_of(device)
        with stream.on_stream():
            values.copy_(host, non_blocking=True)
        event = stream.event()
        stream.uses(values)  # they may be dropped unread, when a backward fails, with the copy still in flight
        return DeviceCopy(values, event)

    def _stream_of(self, device: torch.device) -> CopyStream:
        if device not in self._streams:
            self._streams[device] = CopyStream(device)
        return self._streams[device]
