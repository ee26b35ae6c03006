"""A flat buffer of many parameters, split into pieces of one format each.

    rows [num_rows, n]   parameter p has the same columns in every row:  | p0 | p1 | p2 | p3 |
    pieces               columns of equal formats, in order:             int8: p0 p2 p3,  none: p1

If a piece's columns are adjacent, it is a view of the rows. Otherwise its columns are copied together, exchanged and
copied back. A piece is exchanged every step; its byte counts and its residual are kept between its exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zcomm._formats.recipes import Wires
from zcomm._residuals.buffer_layout import Span
from zcomm._residuals.grad_scaler import UserLossScale
from zcomm._residuals.residual import Residual
from zcomm.install.choices import FormatChoice
from zcomm.install.report import PieceTotals


@dataclass(frozen=True, slots=True)
class FormatPiece:
    """Columns that are exchanged in one call, in one format."""

    choices: tuple[FormatChoice, ...]
    """The parameters, in order; all have the formats of the first."""
    sizes: tuple[int, ...]
    """Number of columns of each parameter."""
    ranges: tuple[tuple[int, int], ...]
    """Columns [start, stop) of the buffer; adjacent ranges are merged."""

    @property
    def numel(self) -> int:
        """Number of columns."""
        return sum(self.sizes)

    @property
    def is_view(self) -> bool:
        """Whether :meth:`take` returns a view."""
        return len(self.ranges) == 1

    def spans(self, num_rows: int = 1) -> Iterator[Span]:
        """Yield where each parameter lies in the flattened result of :meth:`take`."""
        for row in range(num_rows):
            first = row * self.numel
            for choice, size in zip(self.choices, self.sizes, strict=True):
                yield Span(choice.name, first, size, row * size)
                first += size

    def take(self, rows: Tensor) -> Tensor:
        """Return these columns of ``rows`` [num_rows, n], as [num_rows, numel] with contiguous rows."""
        parts = [rows[:, start:stop] for start, stop in self.ranges]
        return parts[0] if self.is_view else torch.cat(parts, 1)

    def put(self, values: Tensor, rows: Tensor) -> None:
        """Write ``values`` [num_rows, numel] into these columns of ``rows``, unless they are a view of them."""
        if self.is_view:
            return
        sizes = [stop - start for start, stop in self.ranges]
        for (start, stop), part in zip(self.ranges, torch.split(values, sizes, 1), strict=True):
            rows[:, start:stop].copy_(part)


@dataclass(frozen=True, slots=True)
class PieceExchange:
    """An exchange that is repeated every step."""

    piece: FormatPiece
    tally: PieceTotals
    residual: Residual | None = None
    """Error feedback: the next exchange adds what this one has lost."""

    @property
    def wires(self) -> Wires:
        """The formats, which all parameters of the piece share."""
        return self.piece.choices[0].wires

    def start(self, scaling: UserLossScale) -> Residual | None:
        """Return the residual for the next exchange, after committing what the previous step has lost.

        The commit waits here, and not behind the previous exchange, because only now it is known whether the gradient
        scaler has skipped that step.
        """
        if self.residual is None:
            return None
        scaling.begin_exchange(self.residual, id(self))
        return self.residual

    def measure(self, exact: Tensor, compressed: Tensor) -> None:
        """Add the errors of this piece of ``compressed`` rows to the report."""
        self.tally.measure(self.piece.take(exact), self.piece.take(compressed), self.piece.sizes)


def split_by_format(
    choices: Sequence[FormatChoice], sizes: Sequence[int], formats_of: Callable[[FormatChoice], Hashable]
) -> tuple[FormatPiece, ...]:
    """Split a buffer whose parameters have ``sizes`` columns, in order: one piece for each value of ``formats_of``."""
    members: dict[Hashable, list[tuple[FormatChoice, int]]] = {}
    ranges: dict[Hashable, list[tuple[int, int]]] = {}
    start = 0
    for choice, size in zip(choices, sizes, strict=True):
        key, stop = formats_of(choice), start + size
        members.setdefault(key, []).append((choice, size))
        known = ranges.setdefault(key, [])
        if known and known[-1][1] == start:
            known[-1] = (known[-1][0], stop)
        elif size:
            known.append((start, stop))
        start = stop
    pieces = []
    for key, of_key in members.items():
        if ranges[key]:
            chosen, columns = zip(*of_key, strict=True)
            pieces.append(FormatPiece(chosen, columns, tuple(ranges[key])))
    return tuple(pieces)
