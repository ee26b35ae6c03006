"""Host memory for what is offloaded, and the copies between it and the device.

Copies run on a stream of their own, in page-locked memory, where the device is a GPU; on a CPU they are plain copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero._storage.copy_stream import CopyStream
from zero._storage.transfer_counters import record

GRADIENTS = "gradients"
"""In :mod:`zero._storage.transfer_counters`."""


class Arrival:
    """A copy under way."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the host wait until it has ended."""
        if self._event is not None:
            self._event.synchronize()


class HostMemory:
    """Tensors in host memory beside ``device``.

    Args:
        device: The device that is computed on.
        pins: Page-lock memory, from torch's own pool of it, if that device is a GPU.
    """

    def __init__(self, device: torch.device, *, pins: bool) -> None:
        self._pins = pins and device.type == "cuda"
        self._copies = CopyStream(device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, its contents undefined."""
        with torch.inference_mode(mode=False):  # it will serve training too
            return torch.empty(numel, dtype=dtype, pin_memory=self._pins)

    def fetch_gradient(self, mean: Tensor, target: Tensor) -> Arrival:
        """Copy ``mean``, of the device, into ``target`` of any floating dtype; ``mean`` may be overwritten at once."""
        values = mean.to(target.dtype, copy=mean.is_cuda)
        record(GRADIENTS, "to_host", values.numel() * values.element_size())
        with self._copies.on_stream():
            target.copy_(values, non_blocking=values.is_cuda)
        event = self._copies.event()
        self._copies.uses(values)
        return Arrival(event)
