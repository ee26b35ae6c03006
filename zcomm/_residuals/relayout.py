"""Move residuals to another layout of the same parameters, or to other ranks; rows may differ before and after.

    relayout_residuals    buckets change, ranks stay: the ranks of a node hold its residual of the full buffer once, so
                          values are gathered inside the node, one buffer at a time, and cut into the new layout
    load_residuals        ranks change: the sum over all old ranks, parameter by parameter, is split equally among the
                          new ranks that hold an element

The sum of all ranks' residuals is what matters: the part of the gradients so far that was not delivered. Both functions
preserve it, except that the values are encoded in int8 again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm._formats.blocks import divided
from zcomm._residuals.buffer_layout import BufferLayout, RowPiece
from zcomm._residuals.residual import Residual, decode_state
from zcomm.errors import LayoutError, StateError


class _RelayoutRows:
    """Float32 rows for new residuals, to which pieces of old ones are added."""

    def __init__(self, targets: Sequence[Residual]) -> None:
        self.targets = targets
        self.pieces: dict[Hashable, list[tuple[RowPiece, Sequence[Tensor]]]] = {}
        self.values = []
        for target in targets:
            layout, local_rank = target.layout, target.route.local_rank
            values = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
            self.values.append(values)
            rows = layout.rows_in(values, local_rank)
            for piece in layout.pieces_of(local_rank):
                self.pieces.setdefault(piece.key, []).append((piece, rows))

    def add(self, layout: BufferLayout, local_rank: int, values: Tensor) -> None:
        """Add ``values``, float32 as of :meth:`Residual.values`, that a rank of local rank ``local_rank`` holds."""
        held = layout.rows_in(values, local_rank)
        for source in layout.pieces_of(local_rank):
            for target, rows in self.pieces.get(source.key, []):
                low = max(source.offset, target.offset)
                numel = min(source.offset + source.numel, target.offset + target.numel) - low
                if numel > 0:
                    column = target.column + low - target.offset
                    start = source.column + low - source.offset
                    part, own = held[source.row][start : start + numel], rows[target.row][column : column + numel]
                    own += part.to(own.device)

    def store(self, num_commits: int, divisor: int | None = None) -> None:
        """Encode the values / ``divisor`` as the new residuals; default: the number of ranks that hold each row."""
        for target, values in zip(self.targets, self.values, strict=True):
            target.set_values(divided(values, target.layout.num_rows if divisor is None else divisor))
            target.num_commits = num_commits


def relayout_residuals(old: Sequence[Residual], new: Sequence[Residual], *, of_both: bool = False) -> None:
    """Move the values of residuals ``old`` into residuals ``new`` of the same parameters in other buffers.

    Args:
        old: One for each buffer, in the same order on every rank. Unchanged.
        new: Over the same nodes and ranks; overwritten.
        of_both: move only the parameters that both have, each of them completely; others of ``new`` start at zero.

    Raises:
        LayoutError: Not the same parameters, nodes or ranks. Raised before any communication.
        StateError: An old residual has exchanges since its last commit.

    Collective. Cost for each rank: on two hops its codes and scales to every other rank of its node, buffer by buffer,
    and nothing between nodes; on one hop no traffic. Scratch: an old buffer's codes, 1 / L of it in float32, and the
    new rows in float32.
    """
    for residual in old:
        residual.check_committed("relayout_residuals()")
    _check_same_parameters([r.layout for r in old], [r.layout for r in new], of_both=of_both)
    ranks = {(r.layout.num_nodes, r.layout.ranks_per_node) for r in (*old, *new)}
    if len(ranks) > 1:
        raise LayoutError(
            f"residuals must be over the same nodes and ranks per node, got {sorted(ranks)}: pass the state_dict() of "
            "all ranks to load_residuals()"
        )
    staging = _RelayoutRows(new)
    for residual in old:
        for local_rank, values in residual.values_of_node():
            staging.add(residual.layout, local_rank, values)
    staging.store(max((r.num_commits for r in old), default=0), divisor=1)


def load_residuals(states: Iterable[Mapping[str, Any]], new: Sequence[Residual]) -> None:
    """Restore residuals that were saved by other ranks or for other buffers: each parameter's sum, split equally.

    Args:
        states: The ``state_dict()`` of every rank and buffer, in any order; read one at a time.
        new: This rank's residuals of the same parameters; overwritten.

    Raises:
        LayoutError: Not the same parameters.
        StateError: The states of some ranks are missing, or given twice.

    Cost for each rank: no communication. Scratch: one state's values and the new rows, in float32.
    """
    staging, seen, num_commits = _RelayoutRows(new), dict[BufferLayout, list[tuple[int, int]]](), 0
    for state in states:
        layout = BufferLayout.from_state(state["layout"])
        seen.setdefault(layout, []).append((state["node_rank"], state["local_rank"]))
        num_commits = max(num_commits, int(state["num_commits"]))
        staging.add(layout, state["local_rank"], decode_state(state))
    for layout, ranks in seen.items():
        expected = [(n, local) for n in range(layout.num_nodes) for local in range(layout.ranks_per_node)]
        if sorted(ranks) != expected:
            raise StateError(
                f"states must hold one state of every rank for each buffer: (node, local rank) = {sorted(ranks)}, "
                f"expected {expected}, for the buffer of {layout.numel} elements"
            )
    _check_same_parameters(list(seen), [r.layout for r in new])
    staging.store(num_commits)


def _check_same_parameters(old: Sequence[BufferLayout], new: Sequence[BufferLayout], *, of_both: bool = False) -> None:
    before, after = _lengths(old), _lengths(new)
    for key in [key for key in before if key in after] if of_both else (*before, *after):
        if before.get(key) != after.get(key):
            raise LayoutError(
                f"old and new layouts must hold the same elements of the same parameters: {key!r} has "
                f"{before.get(key, 0)} elements in the old ones, {after.get(key, 0)} in the new ones"
            )


def _lengths(layouts: Sequence[BufferLayout]) -> dict[Hashable, int]:
    """Elements of each parameter."""
    lengths: dict[Hashable, int] = {}
    for layout in layouts:
        for span in layout.spans:
            lengths[span.key] = lengths.get(span.key, 0) + span.numel
    return lengths
