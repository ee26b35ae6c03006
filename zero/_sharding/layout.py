"""Layout of a bucket: offsets of its parameters and its partition into shards. Arithmetic only, without tensors.

A bucket is one flat buffer. Every parameter starts on a multiple of ``align`` elements, and every shard is a multiple
of ``align`` elements long, so a quantization block never straddles two parameters or two shards:

    | weight ............. pad | bias ..... pad | pad to world_size * align |
    | shard 0        | shard 1        | shard 2        | shard 3            |

For an optimizer that updates whole tensors, shards have sizes of their own, and every tensor is in one of them
(:mod:`zero._sharding.placement`):

    | weight ............. pad | bias ..... pad | pad |
    | shard 0                  | shard 2        | pad |        shards 1 and 3 are empty

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
from itertools import accumulate
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
    is_whole: bool = False
    """Whether its optimizer updates it as a tensor of its shape, not as flat pieces."""

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
    """The slots of one bucket and its partition into ``world_size`` shards."""

    slots: tuple[Slot, ...]
    world_size: int
    align: int
    sizes: tuple[int, ...] | None = None
    """Elements of each shard; None: all have the same."""

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        world_size: int,
        align: int = ALIGN,
        *,
        whole: Sequence[bool] | None = None,
        owners: Sequence[int] | None = None,
    ) -> BucketLayout:
        """Place parameters one after the other, each on a multiple of ``align`` elements.

        Args:
            names: Of the parameters.
            shapes: Their shapes.
            world_size: The number of shards.
            align: In elements.
            whole: Which of them are updated as whole tensors; None: none is.
            owners: The shard that each is in, in ascending order; None: shards are equal, and cut anywhere.
        """
        slots, offset = [], 0
        for name, shape, is_whole in zip(names, shapes, whole or [False] * len(names), strict=True):
            end = offset + round_up(prod(shape), align)
            slots.append(Slot(name, tuple(shape), offset, end, is_whole))
            offset = end
        if owners is None:
            return cls(tuple(slots), world_size, align)
        assert list(owners) == sorted(owners), "parameters of one shard must be adjacent"
        sizes = [0] * world_size
        for slot, owner in zip(slots, owners, strict=True):
            sizes[owner] += slot.end - slot.offset
        # As many elements as equal shards would have together: the node's copies of a bucket are divided, too.
        sizes[max(owners, default=0)] += round_up(offset, world_size * align) - offset
        return cls(tuple(slots), world_size, align, tuple(sizes))

    @cached_property
    def _ends(self) -> list[int]:
        return [slot.end for slot in self.slots]

    def slot_at(self, offset: int) -> int:
        """The index of the slot that element ``offset`` is in; the last slot for an offset behind them all."""
        return min(bisect_right(self._ends, offset), len(self.slots) - 1)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard; where shards differ, on average."""
        return self.numel // self.world_size

    @cached_property
    def numel(self) -> int:
        """Elements of the full bucket, padding included."""
        used = self.slots[-1].end if self.slots else 0
        return round_up(used, self.world_size * self.align)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Where shards start, and where the last one stops."""
        return (0, *accumulate(self.sizes or [self.shard_numel] * self.world_size))

    def shard_range(self, shard: int) -> tuple[int, int]:
        """The elements of shard number ``shard`` in the bucket, ``(start, stop)``."""
        return self._bounds[shard], self._bounds[shard + 1]

    def node_numel(self, shard: int, num_nodes: int) -> int:
        """Elements of the shards of the ranks with the local rank of the one that has ``shard``; ``num_nodes`` each."""
        first = shard - shard % num_nodes
        return self.shard_range(first + num_nodes - 1)[1] - self.shard_range(first)[0]

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of padding, ``(start, stop)``; no parameter writes to them."""
        starts = [slot.offset + slot.numel for slot in self.slots]
        stops = [slot.end for slot in self.slots[:-1]] + [self.numel]
        return tuple((a, b) for a, b in zip(starts, stops, strict=True) if a < b)

    def gaps_of(self, shard: int) -> list[tuple[int, int]]:
        """The ranges of padding in shard number ``shard``, ``(start, stop)`` counted from its start."""
        low, high = self.shard_range(shard)
        return [(max(a, low) - low, min(b, high) - low) for a, b in self.gaps if a < high and b > low]

    def pieces(self, shard: int | None) -> Iterator[ShardPiece]:
        """The pieces of shard number ``shard``, in order; None: of the bucket as one shard."""
        low, high = (0, self.numel) if shard is None else self.shard_range(shard)
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
            if start < stop:
                yield ShardPiece(index, start - slot.offset, start - low, stop - low)

    def chunks(self, max_numel: int, *, first_numel: int | None = None) -> list[tuple[int, int]]:
        """Column ranges of the shards such that one exchange carries at most ``max_numel`` elements of the bucket.

        The first exchange carries at most ``first_numel`` if that is less. Every exchange carries at least ``align``
        elements of each shard, however small the limits are. Shards of different sizes are exchanged at once: the range
        is that of the largest.
        """
        if self.sizes is not None:
            return [(0, max(self.sizes))]
        width = self._width(max_numel)
        first = min(width, self._width(max_numel if first_numel is None else first_numel), self.shard_numel)
        starts = [0, *range(first, self.shard_numel, width)] if self.shard_numel else []
        return list(zip(starts, [*starts[1:], self.shard_numel], strict=True)) if starts else []

    def _width(self, max_numel: int) -> int:
        return max(max_numel // (self.world_size * self.align), 1) * self.align
