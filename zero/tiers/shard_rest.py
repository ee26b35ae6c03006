"""Where the shard of one bucket rests between uses, and how new values get there.

    update --target--> the memory to write into --written--> on its way to where the shard rests --flush--> there

The update of a step may write a shard in pieces, in any order, each announced by ``written``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["InPlace", "ShardRest"]


class ShardRest(ABC):
    """The resting place of one shard. Elements are counted from the shard's start."""

    @abstractmethod
    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Memory for the new values of elements ``[start, stop)``, in the parameters' dtype, its contents undefined.

        Args:
            start: First element.
            stop: End of the range.
            device: Where the update runs; default: where the shard rests, host memory for files.

        Each range is to be passed to :meth:`written` before it, or another that overlaps it, is asked for again.
        """

    @abstractmethod
    def written(self, start: int, stop: int) -> None:
        """The values of a range that :meth:`target` gave are there: they go on to where the shard rests."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was written has arrived."""


class InPlace(ShardRest):
    """The shard is a tensor that stays where it is: in device memory.

    An update on another device, the host, writes into memory of its own, and ``written`` copies that to the shard.
    """

    def __init__(self, shard: Tensor) -> None:
        self._shard = shard
        self._staged: dict[tuple[int, int], Tensor] = {}

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Elements of the shard itself, unless the update runs on another device."""
        own = self._shard[start:stop]
        if device is None or device.type == own.device.type:
            return own
        staged = torch.empty(stop - start, dtype=own.dtype, device=device, pin_memory=device.type == "cpu")
        return self._staged.setdefault((start, stop), staged)

    def written(self, start: int, stop: int) -> None:
        """Copy what was staged. The host may go on: later work of the device waits for the copy."""
        staged = self._staged.pop((start, stop), None)
        if staged is not None:
            self._shard[start:stop].copy_(staged, non_blocking=True)

    def flush(self) -> None:
        """Nothing is left to do: the device's queue keeps the order."""
