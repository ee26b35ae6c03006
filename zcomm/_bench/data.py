"""Data that every rank can compute of every other: a rank's tensor is one tile of normal numbers, turned and repeated.

Element i of rank r is ``tile[(i + r * TURN) % PERIOD]``, so that sums over ranks are tiles, too, and 1 GiB is filled,
and checked, at the speed of memory. PERIOD is prime: blocks never repeat with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

PERIOD = 65537
TURN = 7919


class Tiles:
    """The data of all ranks in one dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """The tile, the same everywhere."""
        self.tile = torch.randn(PERIOD, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def of_rank(self, rank: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of ``rank``'s tensor."""
        return _repeated(self.tile, start + rank * TURN, stop - start)

    def sum_of(self, ranks: range, start: int, stop: int) -> Tensor:
        """The exact sum over ``ranks`` of their elements [start, stop), float64."""
        wide = self.tile.double()
        total = torch.stack([_repeated(wide, rank * TURN, PERIOD) for rank in ranks]).sum(0)
        return _repeated(total, start, stop - start)

    def magnitudes(self, ranks: range, start: int, stop: int) -> Tensor:
        """The same of the absolute values."""
        positive = Tiles.__new__(Tiles)
        positive.tile = self.tile.abs()
        return positive.sum_of(ranks, start, stop)


def _repeated(tile: Tensor, start: int, numel: int) -> Tensor:
    turned = tile.roll(-(start % PERIOD))
    return turned.repeat(-(-numel // PERIOD))[:numel].contiguous() if numel > PERIOD else turned[:numel]
