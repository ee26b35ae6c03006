"""Where parameters lie in the rows of a flat buffer: residuals are stored by row, and moved by parameter.

    buffer      [numel], padded to W rows of shard_numel = ceil(numel / W) elements
    span        consecutive elements of one parameter in the buffer; elements in no span are padding
    piece       consecutive elements of one parameter in one of the rows that a rank holds

A rank holds the rows that it encodes for the last hop of a reduction. On two hops (N nodes, L ranks per node) these are
the N rows of the ranks of its own local rank, one per node; on one hop all W rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

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

    @classmethod
    def of(cls, spans: Iterable[Any], numel: int, route: Route, numbering: Numbering) -> BufferLayout:
        """The layout over the ranks of ``route``; ``spans`` may be plain tuples.

        Raises:
            LayoutError: A span is invalid or leaves the buffer, or two overlap in the buffer or in their parameter.
        """
        check_numbering(numbering)
        found, numel = _spans(spans), as_count("numel", numel, at_least=1)
        shape = {"num_nodes": route.num_nodes, "ranks_per_node": route.ranks_per_node}
        layout = cls(spans=found, numel=numel, numbering=numbering, **shape)
        layout._check()
        return layout

    def _check(self) -> None:
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
        return -(-self.numel // self.world_size)

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

    def pieces_of(self, local_rank: int) -> Iterator[RowPiece]:
        """The pieces in the rows that the ranks of local rank ``local_rank`` hold."""
        held, n = {row: index for index, row in enumerate(self.rows_of(local_rank))}, self.shard_numel
        for span in self.spans:
            first = span.first
            while first < span.first + span.numel:
                row, column = divmod(first, n)
                numel = min(n - column, span.first + span.numel - first)
                if row in held:
                    yield RowPiece(span.key, span.offset + first - span.first, numel, held[row], column)
                first += numel
