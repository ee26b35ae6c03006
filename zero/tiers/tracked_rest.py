"""A shard on the device whose bits the host knows: a step's update sends what it changes, in 4 bits.

    new values - copy on the host --int4 blocks of 128--> message --> decoded and added, on the device and to the copy

The arithmetic is N11 of :mod:`zcomm.quant`, as in :class:`zcomm.DeltaGather`, with one receiver.

Invariants:
    C1  The device and the copy have the same bits, between any two writes.
    C2  So what a step's message loses is part of the next step's change: errors do not add up.
    C3  What is not a step's is sent as it is, and so ends NaN, which stays NaN otherwise.
    C4  Blocks are counted from the start of the shard: pieces on multiples of 128 give the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zcomm import FORMATS, kernels
from zcomm.message import layout_of
from zero.tiers.host import HostMemory
from zero.tiers.moved import record
from zero.tiers.shard_rest import KIND, InPlace

__all__ = ["CHANGE_FORMAT", "Tracked"]

CHANGE_FORMAT = FORMATS["int4"]
CHUNK_NUMEL = 2**17
"""Elements of one message: what is computed on the way stays in the cache, and the link has work meanwhile."""


class Tracked(InPlace):
    """On the device, and the same bits in host memory. Updates run on the host.

    Args:
        shard: Stays where it is; floating point.
        host: Where the copy is made, and what is on its way.

    Cost: n elements of host memory, and n more for the new values of an update until they are written; 0.516 bytes an
    element to the device.
    """

    def __init__(self, shard: Tensor, host: HostMemory) -> None:
        super().__init__(shard, updates_on_host=True)
        self._host, self._is_exact = host, False
        self.held = host.empty(shard.numel(), shard.dtype).copy_(shard)
        """What the device has."""

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        """Host memory."""
        values = self._staged[start, stop] = self._host.empty(stop - start, self.shard.dtype)
        return values

    def written(self, start: int, stop: int) -> None:
        """Send what has changed, or inside :meth:`exactly` all. The host may go on."""
        values, own, held = self._staged.pop((start, stop)), self.shard[start:stop], self.held[start:stop]
        assert values is not None, "new values of a shard that nobody has written"
        if self._is_exact:
            held.copy_(values)
            record(KIND, self.link, values.nbytes)
            own.copy_(values, non_blocking=own.is_cuda)
            return
        for chunk in (slice(first, first + CHUNK_NUMEL) for first in range(0, own.numel(), CHUNK_NUMEL)):
            self._send_change(values[chunk], held[chunk], own[chunk])

    def _send_change(self, values: Tensor, held: Tensor, own: Tensor) -> None:
        layout = layout_of("offload_change", CHANGE_FORMAT, torch.float32, 1, own.numel())
        message = self._host.empty(layout.nbytes, torch.uint8).view(1, -1)
        kernels.quantize_difference(values, held, layout, message)
        kernels.decode_add(message, layout, held.view(1, -1))
        record(KIND, self.link, message.nbytes)
        kernels.decode_add(message.to(own.device, non_blocking=own.is_cuda), layout, own.view(1, -1))

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Inside, what is written arrives as it is."""
        self._is_exact = True
        try:
            yield
        finally:
            self._is_exact = False

    def keep(self) -> None:
        """The device's values were changed."""
        self.held.copy_(self.shard)
