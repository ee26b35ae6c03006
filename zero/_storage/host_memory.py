"""Host memory for offloaded states and gradients, and the copies to it from the device.

With a GPU the memory is page-locked, and copies run on a stream of their own; on a CPU they are plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero._storage.transfer_counters import record


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

    def join(self) -> None:
        """Later work of the compute stream runs after the copies and exchanges enqueued here so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def event(self) -> torch.cuda.Event | None:
        """An event that completes when all copies so far have; None: they have completed."""
        return None if self._stream is None else self._stream.record_event()

    def uses(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor`` from being reused before all copies so far have completed."""
        # torch's caching allocator knows only the stream that a tensor was allocated on: freed there, the memory would
        # be handed to a kernel that overwrites it while the copy still reads.
        if self._stream is not None:
            tensor.record_stream(self._stream)


GRADIENTS = "gradients"
"""What these copies are counted under: see transfer_counters.py."""


class PendingCopy:
    """A copy in flight."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Block the host until the copy is complete: before it, the host would read what the copy overwrites."""
        if self._event is not None:
            self._event.synchronize()


class HostMemory:
    """Tensors in host memory beside ``device``.

    Args:
        device: The device that computes.
        pins: Page-lock the memory, from torch's pinned-memory pool, if the device is a GPU.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._pins = pins and device.type == "cuda"
        self._copies = CopyStream(device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor; its contents are undefined."""
        with torch.inference_mode(mode=False):  # a tensor made in inference mode could not be used in training
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pins)

    def fetch_gradient(self, mean: Tensor, target: Tensor) -> PendingCopy:
        """Start copying ``mean`` from the device into ``target``, of any floating dtype.

        ``mean`` may be overwritten at once: on a GPU the copy reads a clone of it.
        """
        values = mean.to(target.dtype, copy=mean.is_cuda)
        record(GRADIENTS, "to_host", values.numel() * values.element_size())
        with self._copies.on_stream():
            target.copy_(values, non_blocking=values.is_cuda)
        event = self._copies.event()
        self._copies.uses(values)
        return PendingCopy(event)
