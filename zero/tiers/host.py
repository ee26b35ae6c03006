"""Host memory for what is offloaded, and the copies between it and the device.

Copies run on a stream of their own, in page-locked memory, where the device is a GPU; on a CPU they are plain copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm import FORMATS, kernels
from zcomm.message import MessageLayout, layout_of
from zero.tiers.moved import record

__all__ = ["GRADIENT_FORMAT", "Arrival", "HostMemory"]

GRADIENT_FORMAT = FORMATS["int8"]
"""Of gradients on a compressed link: blocks of 256 elements, which sub-groups of files do not cut."""
GRADIENTS = "gradients"
"""In :mod:`zero.tiers.moved`."""


class Arrival:
    """A copy under way."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the host wait until it has ended."""
        if self._event is not None:
            self._event.synchronize()


class EncodedArrival(Arrival):
    """A message under way, decoded once it has come."""

    def __init__(self, arrival: Arrival, message: Tensor, layout: MessageLayout, target: Tensor) -> None:
        super().__init__()
        self._arrival, self._message, self._layout, self._target = arrival, message, layout, target

    def wait(self) -> None:
        """Wait, and decode into the target."""
        self._arrival.wait()
        kernels.decode(self._message, self._layout, self._target, 0, 0)


class HostMemory:
    """Tensors in host memory beside ``device``.

    Args:
        device: The device that is computed on.
        pins: Page-lock memory, from torch's own pool of it, if that device is a GPU.
        compresses: What crosses between the two is encoded: gradients here, parameters in
            :class:`zero.tiers.tracked_rest.Tracked`.
    """

    def __init__(self, device: torch.device, *, pins: bool, compresses: bool = False) -> None:
        self._device, self.compresses = device, compresses
        self._pins = pins and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, its contents undefined."""
        with torch.inference_mode(mode=False):  # it will serve training too
            return torch.empty(numel, dtype=dtype, pin_memory=self._pins)

    def fetch_gradient(self, mean: Tensor, target: Tensor) -> Arrival:
        """Copy ``mean``, of the device, into ``target`` of any floating dtype; ``mean`` may be overwritten at once.

        On a compressed link as int8 blocks: an error of half a scale, 1/254 of the largest of 256 elements and a little
        for the rounding of scales. A block with a NaN or an infinity arrives as NaN.
        """
        if not self.compresses:
            return self.fetch(mean.to(target.dtype, copy=mean.is_cuda), target, GRADIENTS)
        layout = layout_of("offload_gradient", GRADIENT_FORMAT, mean.dtype, 1, mean.numel())
        message = layout.new(1, mean.device)
        kernels.quantize(mean, layout, message, 0, 0)
        arrived = self.empty(layout.nbytes, torch.uint8).view(1, -1)
        return EncodedArrival(self.fetch(message, arrived, GRADIENTS), arrived, layout, target)

    def fetch(self, source: Tensor, target: Tensor, kind: str) -> Arrival:
        """Copy ``source``, of the device and of the target's dtype, into ``target``; counted as ``kind``.

        ``source`` must not be written again by others than torch's allocator.
        """
        record(kind, "to_host", source.numel() * source.element_size())
        if source.device.type != "cuda":
            target.copy_(source)
            return Arrival()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        source.record_stream(self._stream)
        return Arrival(event)
