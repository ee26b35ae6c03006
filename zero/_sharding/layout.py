"""Layout of a bucket: offsets of its parameters and its partition into shards. Arithmetic only, without tensors.

A bucket is one flat buffer. Every parameter starts on a multiple of ``align`` elements, and every shard is a multiple
of ``align`` elements long, so a quantization block never straddles two parameters or two shards:

    | weight ............. pad | bias ..... pad | pad to world_size * align |
    | shard 0        | shard 1        | shard 2        | shard 3            |

Invariants:
    L1  A parameter's offset within its block grid depends on the parameter alone: its codes are the same at every
        stage, world size and bucket size.
    L2  A piece (a parameter's intersection with a shard) starts and ends on multiples of ``align``. Padding elements
        in it are zero, in parameters and in gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGN = 256
"""In elements: the largest default block of any wire format, and a multiple of all of them."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def group_consecutive(numels: Iterable[int], max_numel: int) -> list[list[int]]:
    """Indices of consecutive units that share a bucket: at most ``max_numel`` elements, but at least one unit."""
    found: list[list[int]] = []
    together = 0
    for index, numel in enumerate(numels):
        if not found or together + numel > max_numel:
            found.append([])
            together = 0
        found[-1].append(index)
        together += numel
    return found


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its bucket: elements ``[offset, offset + numel)``, then zeros up to ``end``."""

    name: str
    shape: tuple[int, ...]
    offset: int
    end: int

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter, padding excluded."""
        return prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Those of a contiguous tensor of its shape."""
        return tuple(prod(max(n, 1) for n in self.shape[axis + 1 :]) for axis in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Elements ``[start, stop)`` of one shard, which are those of slot number ``slot`` from its element ``first`` on.

    No piece has padding in it, so updates of pieces leave it at zero.
    """

    slot: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket and its partition into ``world_size`` equal shards."""

    slots: tuple[Slot, ...]
    world_size: int
    align: int

    @classmethod
    def of(
        cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]], world_size: int, align: int = ALIGN
    ) -> BucketLayout:
        """Place parameters one after the other, each on a multiple of ``align`` elements."""
        slots, offset = [], 0
        for name, shape in zip(names, shapes, strict=True):
            end = offset + round_up(prod(shape), align)
            slots.append(Slot(name, tuple(shape), offset, end))
            offset = end
        return cls(tuple(slots), world_size, align)

    @cached_property
    def _ends(self) -> list[int]:
        return [slot.end for slot in self.slots]

    def slot_at(self, offset: int) -> int:
        """The index of the slot that element ``offset`` is in; the last slot for an offset behind them all."""
        return min(bisect_right(self._ends, offset), len(self.slots) - 1)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of every shard."""
        used = self.slots[-1].end if self.slots else 0
        return round_up(used, self.world_size * self.align) // self.world_size

    @property
    def numel(self) -> int:
        """Elements of the full bucket, padding included."""
        return self.shard_numel * self.world_size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of padding, ``(start, stop)``; no parameter writes to them."""
        starts = [slot.offset + slot.numel for slot in self.slots]
        stops = [slot.end for slot in self.slots[:-1]] + [self.numel]
        return tuple((a, b) for a, b in zip(starts, stops, strict=True) if a < b)

    def gaps_of(self, shard: int) -> list[tuple[int, int]]:
        """The ranges of padding in shard number ``shard``, ``(start, stop)`` counted from its start."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        return [(max(a, low) - low, min(b, high) - low) for a, b in self.gaps if a < high and b > low]

    def pieces(self, shard: int | None) -> Iterator[ShardPiece]:
        """The pieces of shard number ``shard``, in order; None: of the bucket as one shard."""
        low, high = (0, self.numel) if shard is None else (shard * self.shard_numel, (shard + 1) * self.shard_numel)
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
            if start < stop:
                yield ShardPiece(index, start - slot.offset, start - low, stop - low)

    def chunks(self, max_numel: int, *, first_numel: int | None = None) -> list[tuple[int, int]]:
        """Column ranges of the shards such that one exchange carries at most ``max_numel`` elements of the bucket.

        The first exchange carries at most ``first_numel`` if that is less. Every exchange carries at least ``align``
        elements of each shard, however small the limits are.
        """
        width = self._width(max_numel)
        first = min(width, self._width(max_numel if first_numel is None else first_numel), self.shard_numel)
        starts = [0, *range(first, self.shard_numel, width)] if self.shard_numel else []
        return list(zip(starts, [*starts[1:], self.shard_numel], strict=True)) if starts else []

    def _width(self, max_numel: int) -> int:
        return max(max_numel // (self.world_size * self.align), 1) * self.align
