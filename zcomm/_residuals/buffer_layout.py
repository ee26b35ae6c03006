"""Where parameters lie in the rows of a flat buffer: residuals are stored by row, and moved by parameter.

    buffer      [numel], padded to W rows of shard_numel = ceil(numel / W) elements
    span        consecutive elements of one parameter in the buffer; elements in no span are padding
    piece       consecutive elements of one parameter in one of the rows that a rank holds

Rows may also have sizes of their own, where shards of ranks differ; they add up to numel then.

A rank holds the rows that it encodes for the last hop of a reduction. On two hops (N nodes, L ranks per node) these are
the N rows of the ranks of its own local rank, one per node; on one hop all W rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm._base.arguments import as_count, shown
from zcomm._transport.route import Route, check_numbering
from zcomm._transport.topology import Numbering
from zcomm.errors import LayoutError


class Span(NamedTuple):
    """Elements ``offset`` to ``offset + numel`` of parameter ``key``, in the buffer from element ``first`` on."""

    key: Hashable
    """Identifies the parameter in every layout, such as its name."""
    first: int
    numel: int
    offset: int = 0


class RowPiece(NamedTuple):
    """Elements ``offset`` to ``offset + numel`` of parameter ``key``, in this rank's row ``row`` from ``column`` on."""

    key: Hashable
    offset: int
    numel: int
    row: int
    column: int


def _spans(spans: Any) -> tuple[Span, ...]:
    """Convert ``spans``, each a Span or a tuple of its fields.

    Raises:
        LayoutError: One is neither; the error names the field.
    """
    found = []
    is_iterable = isinstance(spans, Iterable) and not isinstance(spans, (str, bytes, Mapping, Tensor))
    for index, span in enumerate(spans if is_iterable else (spans,)):
        if not isinstance(span, (tuple, list)) or not 3 <= len(span) <= 4 or not _is_hashable(span[0]):
            raise LayoutError(f"spans must be zcomm.Span, or (key, first element, numel): spans[{index}]={shown(span)}")
        key, *numbers = span
        names = Span._fields[1 : len(span)]
        found.append(
            Span(key, *(as_count(f"spans[{index}].{name}", n) for name, n in zip(names, numbers, strict=True)))
        )
    return tuple(found)


def as_shard_sizes(sizes: Any, world_size: int) -> tuple[int, ...] | None:
    """``sizes``, the elements of each rank's shard, as a tuple; None stays None: equal shards.

    Raises:
        LayoutError: Not a list with a count for each rank.
    """
    if sizes is None:
        return None
    if not isinstance(sizes, (list, tuple)) or len(sizes) != world_size:
        raise LayoutError(
            f"shard_sizes must be a list with the elements of each rank's shard: shard_sizes={shown(sizes)}, "
            f"world_size={world_size}"
        )
    return tuple(as_count(f"shard_sizes[{row}]", size) for row, size in enumerate(sizes))


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Where parameters lie in a flat buffer, and which rows of it each rank holds."""

    spans: tuple[Span, ...]
    numel: int
    num_nodes: int
    ranks_per_node: int
    numbering: Numbering
    shard_sizes: tuple[int, ...] | None = field(default=None, repr=False)
    """Elements of each row; None: all have the same. Not in the text, of which checkpoints hold a checksum."""

    @classmethod
    def of(
        cls,
        spans: Iterable[Any],
        numel: int,
        route: Route,
        numbering: Numbering,
        shard_sizes: Sequence[int] | None = None,
    ) -> BufferLayout:
        """The layout over the ranks of ``route``; ``spans`` may be plain tuples.

        Raises:
            LayoutError: A span is invalid or leaves the buffer, or two overlap in the buffer or in their parameter; or
                ``shard_sizes`` do not add up to ``numel``.
        """
        check_numbering(numbering)
        found, numel = _spans(spans), as_count("numel", numel, at_least=1)
        shape = {"num_nodes": route.num_nodes, "ranks_per_node": route.ranks_per_node}
        sizes = as_shard_sizes(shard_sizes, route.world_size)
        layout = cls(spans=found, numel=numel, numbering=numbering, shard_sizes=sizes, **shape)
        layout._check()
        return layout

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> BufferLayout:
        """The inverse of :meth:`as_state`."""
        return cls(**{**state, "spans": tuple(Span(*span) for span in state["spans"])})

    def as_state(self) -> dict[str, Any]:
        """The fields as numbers, strings, tuples and the spans' keys; equal shards have no ``shard_sizes``."""
        fields = vars(self) | {"spans": tuple(tuple(span) for span in self.spans)}
        if self.shard_sizes is None:
            del fields["shard_sizes"]
        return fields

    def _check(self) -> None:
        if self.shard_sizes is not None and sum(self.shard_sizes) != self.numel:
            raise LayoutError(f"shard_sizes must add up to numel: sum={sum(self.shard_sizes)}, numel={self.numel}")
        for span in self.spans:
            if span.first + span.numel > self.numel:
                raise LayoutError(f"a span must lie in the buffer: {span}, numel={self.numel}")
        in_buffer = sorted((span for span in self.spans if span.numel), key=lambda span: span.first)
        for one, other in pairwise(in_buffer):
            if one.first + one.numel > other.first:
                raise LayoutError(f"spans must not overlap in the buffer: {one}, {other}")
        for of_key in self.by_key().values():
            for one, other in pairwise(of_key):
                if one.offset + one.numel > other.offset:
                    raise LayoutError(f"spans must not overlap in their parameter: {one}, {other}")

    def by_key(self) -> dict[Hashable, list[Span]]:
        """The spans of each parameter, in the order of its elements."""
        spans: dict[Hashable, list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.offset):
            spans.setdefault(span.key, []).append(span)
        return spans

    @property
    def world_size(self) -> int:
        """The number of ranks, and of rows."""
        return self.num_nodes * self.ranks_per_node

    @property
    def shard_numel(self) -> int:
        """Elements of a row; where rows differ, on average."""
        return -(-self.numel // self.world_size)

    @property
    def _bounds(self) -> tuple[int, ...]:
        """Where rows start in the buffer, and where the last one stops."""
        return (0, *accumulate(self.shard_sizes or [self.shard_numel] * self.world_size))

    @property
    def has_two_hops(self) -> bool:
        return self.num_nodes > 1 and self.ranks_per_node > 1

    @property
    def num_rows(self) -> int:
        """Rows that each rank holds; also the number of ranks that hold each row."""
        return self.num_nodes if self.has_two_hops else self.world_size

    def rows_of(self, local_rank: int) -> list[int]:
        """The rows that the ranks of local rank ``local_rank`` hold."""
        if not self.has_two_hops:
            return list(range(self.world_size))
        if self.numbering == "rank":
            return [node * self.ranks_per_node + local_rank for node in range(self.num_nodes)]
        return [local_rank * self.num_nodes + node for node in range(self.num_nodes)]

    def row_numels(self, local_rank: int) -> list[int]:
        """The elements of each of :meth:`rows_of`."""
        bounds = self._bounds
        return [bounds[row + 1] - bounds[row] for row in self.rows_of(local_rank)]

    def rows_in(self, values: Tensor, local_rank: int) -> Sequence[Tensor]:
        """The rows of :meth:`rows_of` in ``values``: [num_rows, shard_numel], or side by side where rows differ."""
        if self.shard_sizes is None:
            return values  # type: ignore[return-value]  # a tensor is the sequence of its rows
        return torch.split(values, self.row_numels(local_rank))

    def pieces_of(self, local_rank: int) -> Iterator[RowPiece]:
        """The pieces in the rows that the ranks of local rank ``local_rank`` hold."""
        held, bounds = {row: index for index, row in enumerate(self.rows_of(local_rank))}, self._bounds
        for span in self.spans:
            first = span.first
            while first < span.first + span.numel:
                row = bisect_right(bounds, first) - 1
                numel = min(bounds[row + 1], span.first + span.numel) - first
                if row in held:
                    yield RowPiece(span.key, span.offset + first - span.first, numel, held[row], first - bounds[row])
                first += numel
