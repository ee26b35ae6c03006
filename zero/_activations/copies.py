"""Copies between device and host memory, on a stream of their own where there is CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from zero._storage.copy_stream import CopyStream


class Arriving:
    """A tensor that is being copied."""

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor, event: torch.cuda.Event | None) -> None:
        self._tensor, self._event = tensor, event

    def wait(self) -> Tensor:
        """The tensor, which the current stream may use from here on."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
        return self._tensor


class Copies:
    """All copies of one device, in one order: a buffer is never filled again before it was read."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, CopyStream] = {}

    def to_host(self, values: Tensor, host: Tensor) -> None:
        """Start copying ``values`` to ``host``; they may be freed, but not changed, before it ends."""
        stream = self._stream_of(values.device)
        with stream.on_stream():
            host.copy_(values, non_blocking=values.is_cuda)
        stream.uses(values)

    def to_device(self, host: Tensor, device: torch.device) -> Arriving:
        """Start copying ``host``, after everything that was started before."""
        if device.type != "cuda":
            return Arriving(host.data.to(device), None)
        values, stream = torch.empty_like(host, device=device), self._stream_of(device)
        with stream.on_stream():
            values.copy_(host, non_blocking=True)
        event = stream.event()
        stream.uses(values)
        return Arriving(values, event)

    def _stream_of(self, device: torch.device) -> CopyStream:
        if device not in self._streams:
            self._streams[device] = CopyStream(device)
        return self._streams[device]
