"""What optimizers' moments rest in: a number for each element, or blocks of int8.

    Elements   float32, or bfloat16           one value for each element
    Blocks     uint8 [num_blocks * 260]       records of 256 elements: cpp/include/zcomm/moment_blocks.h

Records are counted from the start of a rank's part of a parameter. Such parts begin on multiples of 256 elements of the
parameter, and so do sub-groups of files: a block holds the same elements at every world size, stage and sub-group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from zcomm import ConfigError

__all__ = ["Blocks", "Decoded", "Elements", "MomentFormat", "MomentLayout"]

BLOCK, RECORD_NBYTES = 256, 260
LEAST_SCALE = 2.0**-46
AT_ONCE = 2**20
"""Elements that are decoded or encoded at a time."""


class MomentFormat(Enum):
    """What all moments of an optimizer rest in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @staticmethod
    def of(name: str, *, is_wide: bool = True) -> MomentFormat:
        """By its name; ``is_wide=False``: bfloat16 instead of float32.

        Raises:
            ConfigError: There is no such format.
        """
        names = [known.value for known in MomentFormat]
        if name not in names:
            raise ConfigError(f"moment_format must be one of {', '.join(names)}: moment_format={name!r}")
        return MomentFormat.BFLOAT16 if name == "float32" and not is_wide else MomentFormat(name)

    @property
    def nbytes(self) -> float:
        """Of an element."""
        return {"float32": 4.0, "bfloat16": 2.0, "int8": RECORD_NBYTES / BLOCK}[self.value]

    def layout(self, *, is_square: bool) -> MomentLayout:
        """Of one moment; ``is_square``: a mean or sum of squares."""
        if self is MomentFormat.INT8:
            return Blocks(is_square)
        return Elements(torch.float32 if self is MomentFormat.FLOAT32 else torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Elements:
    """One value for each element."""

    dtype: torch.dtype

    def numel(self, count: int) -> int:
        """Elements of the tensor that holds ``count`` of the moment."""
        return count

    def floor(self, start: int) -> int:
        """The last element not behind ``start`` at which the tensor can be cut."""
        return start

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """What holds elements ``[start, stop)``."""
        return tensor[start:stop]

    def decode(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The values of elements ``[start, stop)``."""
        return tensor[start:stop]

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Replace the first elements."""
        tensor[: values.numel()].copy_(values)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Records of 256 elements, in int8 with a scale."""

    is_square: bool
    """A mean or sum of squares, of which the root is stored, and never 0 for what is above 0."""
    dtype: ClassVar[torch.dtype] = torch.uint8

    def numel(self, count: int) -> int:
        """Bytes of the records of ``count`` elements."""
        return -(-count // BLOCK) * RECORD_NBYTES

    def floor(self, start: int) -> int:
        """The start of the record of element ``start``."""
        return start // BLOCK * BLOCK

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The records of elements ``[start, stop)``; ``start`` is a multiple of 256."""
        assert start % BLOCK == 0, f"a cut through a block at {start}"
        return tensor[self.numel(start) : self.numel(stop)]

    def decode(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The values of elements ``[start, stop)``, in float32."""
        values = torch.empty(stop - start, dtype=torch.float32)
        for first, last in _runs(self.floor(start), stop):
            decoded = self._decoded(self.part(tensor, first, last))
            low = max(first, start)
            values[low - start : last - start] = decoded[low - first : last - first]
        return values

    def _decoded(self, records: Tensor) -> Tensor:
        rows = records.view(-1, RECORD_NBYTES)
        scales, codes = rows[:, :4].contiguous().view(torch.float32), rows[:, 4:].contiguous()
        levels = (codes if self.is_square else codes.view(torch.int8)).float()
        values = scales * (levels * levels.abs() / self._num_levels)
        return (values * values if self.is_square else values).flatten()

    def encode(self, values: Tensor) -> Tensor:
        """The records of ``values`` [numel], each at its nearest level: those of decoded values are as they were."""
        records = torch.zeros(self.numel(values.numel()), dtype=torch.uint8)
        self.write(records, values)
        return records

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Replace the first elements; the others of their last block become 0."""
        for start, stop in _runs(0, values.numel()):
            tensor[self.numel(start) : self.numel(stop)] = self._encoded(values[start:stop].float())

    def _encoded(self, values: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        magnitudes = rows.sqrt() if self.is_square else rows.abs()
        largest = magnitudes.amax(1, keepdim=True)
        is_finite = largest.isfinite()
        scales = torch.where(is_finite, largest.clamp_min(LEAST_SCALE), float("nan"))
        squares = magnitudes / scales * self._num_levels
        floors = squares.sqrt().floor()
        low = floors * floors
        gaps, above = 2 * floors + 1, squares - low
        if self.is_square:
            gaps, above = gaps * (2 * low + 2 * floors + 1), above * (squares + low)
        codes = floors + (0.5 * gaps < above)
        codes = torch.maximum(codes, (rows > 0).float()) if self.is_square else torch.where(rows < 0, -codes, codes)
        codes = torch.where(is_finite, codes, 0.0).to(torch.int16).to(torch.uint8)
        return torch.cat([scales.view(torch.uint8).view(-1, 4), codes], 1).flatten()

    @property
    def _num_levels(self) -> float:
        return 255.0**2 if self.is_square else 127.0**2


MomentLayout = Elements | Blocks


def _runs(start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = min(start + AT_ONCE, stop)
        yield start, end
        start = end


@dataclass(frozen=True, slots=True)
class Decoded:
    """Reads the values of records in memory, for a checkpoint."""

    records: Tensor
    blocks: Blocks

    def __call__(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``."""
        return self.blocks.decode(self.records, start, stop)

    def copied(self) -> Decoded:
        """The same from memory of its own."""
        return Decoded(self.records.clone(), self.blocks)
