"""Copies between device and host memory, on a stream of their own where there is CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Arriving", "Copies"]


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
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def to_host(self, values: Tensor, host: Tensor) -> None:
        """Start copying ``values`` to ``host``; they may be freed, but not changed, before it ends."""
        if not values.is_cuda:
            host.copy_(values)
            return
        stream = self._stream_after_current(values.device)
        with torch.cuda.stream(stream):
            host.copy_(values, non_blocking=True)
        values.record_stream(stream)

    def to_device(self, host: Tensor, device: torch.device) -> Arriving:
        """Start copying ``host``, after everything that was started before."""
        if device.type != "cuda":
            return Arriving(host.to(device), None)
        values = torch.empty_like(host, device=device)
        stream = self._stream_after_current(device)
        with torch.cuda.stream(stream):
            values.copy_(host, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        values.record_stream(stream)
        return Arriving(values, event)

    def _stream_after_current(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream
