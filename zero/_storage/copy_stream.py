"""Copies between host memory and the device, on a stream of their own: they run beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CopyStream:
    """The stream of copies to or from ``device``; without CUDA there is none, and copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Inside, copies and exchanges wait for what the computation has been given to do until now, not later.

        Whoever uses what an exchange brings waits for the exchange, and so for the copies before it.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """Passed when all copies so far are made; None: they are made."""
        return None if self._stream is None else self._stream.record_event()

    def uses(self, tensor: Tensor) -> None:
        """Tell torch's allocator that ``tensor``, if it is freed, is needed until all copies so far are made."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
