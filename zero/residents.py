"""Which small parameters stay whole at stage 3, in buckets of their own, wherever in the model they are.

After every step, and whenever somebody has changed them, they are gathered anew, in the format of every gather: what a
forward reads is the same bit for bit as if each layer gathered them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from zero.units import Unit

__all__ = ["choose_residents", "set_apart"]


def choose_residents(units: Sequence[Unit], *, less_than: int, total: int) -> set[nn.Parameter]:
    """Parameters of fewer than ``less_than`` elements, in order, as long as they have ``total`` elements together."""
    chosen: set[nn.Parameter] = set()
    for param in (param for unit in units for _, param in unit.parameters):
        if param.numel() < less_than and param.numel() <= total:
            chosen.add(param)
            total -= param.numel()
    return chosen


def set_apart(units: Sequence[Unit], residents: set[nn.Parameter], model: nn.Module) -> tuple[list[Unit], Unit]:
    """``units`` without ``residents``, and these as a unit of ``model``."""
    kept = [
        replace(unit, parameters=tuple(named for named in unit.parameters if named[1] not in residents))
        for unit in units
    ]
    named = tuple(named for unit in units for named in unit.parameters if named[1] in residents)
    return kept, Unit("persistent", model, named)
