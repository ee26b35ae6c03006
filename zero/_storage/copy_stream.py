"""A CUDA stream for copies between host memory and the device, which overlap the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CopyStream:
    """The stream of copies to or from ``device``; without CUDA there is none, and copies complete at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Within the block, copies and exchanges are enqueued on the copy stream.

        They wait for the kernels enqueued on the compute stream so far, and for no later ones. Who uses the result of
        an exchange waits for the exchange, and so for the copies before it.
        """
        if self._stream is None:
            yield
            return
        # Without this wait a copy could overwrite a buffer that earlier kernels still read, or copy values that they
        # have not written yet (tests/zero/test_copy_streams.py).
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """An event that completes when all copies so far have; None: they have completed."""
        return None if self._stream is None else self._stream.record_event()

    def uses(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor`` from being reused before all copies so far have completed."""
        # torch's caching allocator knows only the stream that a tensor was allocated on: freed there, the memory would
        # be handed to a kernel that overwrites it while the copy still reads.
        if self._stream is not None:
            tensor.record_stream(self._stream)
