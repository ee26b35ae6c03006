"""Layout of a bucket: offsets of its parameters and its partition into shards. Arithmetic only, without tensors.

A bucket is one flat buffer. Every parameter starts on a multiple of ``align`` elements, and every shard is a multiple
of ``align`` elements long, so a quantization block never straddles two parameters or two shards:

    | weight ............. pad | bias ..... pad | pad to world_size * align |
    | shard 0        | shard 1        | shard 2        | shard 3            |

For an optimizer that updates whole tensors, shards have sizes of their own, and every tensor is in one of them
(:mod:`zero._sharding.placement`):

    | weight ............. pad | bias ..... pad | pad |
    | shard 0                  | shard 2        | pad |        shards 1 and 3 are empty

A parameter may be several tensors, stacked (fused projections, experts); each of them may be in another shard.

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
from itertools import accumulate, pairwise
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
    parts: tuple[tuple[int, ...], ...] = ()
    """The shapes of the tensors that its optimizer updates, which are stacked in it; empty: it updates flat pieces."""

    @property
    def is_whole(self) -> bool:
        """Whether its optimizer updates whole tensors."""
        return bool(self.parts)

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
    part: int | None = None
    """Of a slot with several parts, the number of the one that this is; None: it is of all that are in the shard."""


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
        parts: Sequence[tuple[tuple[int, ...], ...]] | None = None,
        owners: Sequence[Sequence[int]] | None = None,
    ) -> BucketLayout:
        """Place parameters one after the other, each on a multiple of ``align`` elements.

        Args:
            names: Of the parameters.
            shapes: Their shapes.
            world_size: The number of shards.
            align: In elements.
            parts: Of each, the shapes of the tensors in it that are updated as a whole; none: it is cut; None: all are.
            owners: Of each, the shard that it is in, or the shards that have equal parts of it, then a multiple of
                ``align`` long; together in ascending order. None: shards are equal, and cut anywhere.
        """
        slots, offset = [], 0
        for name, shape, of_one in zip(names, shapes, parts or [()] * len(names), strict=True):
            end = offset + round_up(prod(shape), align)
            slots.append(Slot(name, tuple(shape), offset, end, of_one))
            offset = end
        if owners is None:
            return cls(tuple(slots), world_size, align)
        rows = [row for of_slot in owners for row in of_slot]
        assert rows == sorted(rows), "parameters of one shard must be adjacent"
        sizes = [0] * world_size
        for slot, of_slot in zip(slots, owners, strict=True):
            for row in of_slot:
                sizes[row] += (slot.end - slot.offset) // len(of_slot)
        # As many elements as equal shards would have together: the node's copies of a bucket are divided, too.
        sizes[max(rows, default=0)] += round_up(offset, world_size * align) - offset
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

    @cached_property
    def joint_slots(self) -> tuple[int, ...]:
        """The slots of whole tensors of which several shards have rows."""
        bounds = self._bounds if self.sizes is not None else ()
        slots = enumerate(self.slots)
        return tuple(
            index
            for index, slot in slots
            if len(slot.parts) == 1 and any(slot.offset < bound < slot.offset + slot.numel for bound in bounds)
        )

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

    def tensors(self, shard: int | None) -> Iterator[ShardPiece]:
        """The same, but one piece for each tensor where several are stacked in a slot."""
        for piece in self.pieces(shard):
            shapes = self.slots[piece.slot].parts
            if len(shapes) < 2:
                yield piece
                continue
            base = piece.start - piece.first
            for part, (first, last) in enumerate(pairwise(accumulate(map(prod, shapes), initial=0))):
                if base + first >= piece.start and base + last <= piece.stop:
                    yield ShardPiece(piece.slot, first, base + first, base + last, part)

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
