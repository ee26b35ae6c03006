"""Test data of all ranks, which every rank can compute: one tile of normal numbers, shifted by rank and repeated.

Element i of rank r is ``tile[(i + r * SHIFT) % PERIOD]``. So a sum over ranks is a repeated tile, too, and filling and
checking 1 GiB takes no more than reading and writing it. PERIOD is prime: no block size divides it.
"""

from __future__ import annotations

import torch
from torch import Tensor

PERIOD = 65537
SHIFT = 7919


class Tiles:
    """The data of all ranks, in one dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Make the tile from a fixed seed, so that it is the same on every rank."""
        self.tile = torch.randn(PERIOD, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def of_rank(self, rank: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of ``rank``'s tensor."""
        return _tiled(self.tile, start + rank * SHIFT, stop - start)

    def sum_of(self, ranks: range, start: int, stop: int) -> Tensor:
        """The exact sum over ``ranks`` of their elements [start, stop), float64."""
        wide = self.tile.double()
        total = torch.stack([_tiled(wide, rank * SHIFT, PERIOD) for rank in ranks]).sum(0)
        return _tiled(total, start, stop - start)

    def magnitudes(self, ranks: range, start: int, stop: int) -> Tensor:
        """The sum over ``ranks`` of the elements' absolute values, float64."""
        positive = Tiles.__new__(Tiles)
        positive.tile = self.tile.abs()
        return positive.sum_of(ranks, start, stop)


def _tiled(tile: Tensor, start: int, numel: int) -> Tensor:
    shifted = tile.roll(-(start % PERIOD))
    return shifted.repeat(-(-numel // PERIOD))[:numel].contiguous() if numel > PERIOD else shifted[:numel]
