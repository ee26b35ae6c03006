"""The formats that one kind of exchange may have, the most exact first.

    level       gradients, asked for (a, b)              by a budget alone                    weights, asked for a
    0           the parameters' dtype                    the parameters' dtype                as they are
    1           int8 on hops that are to have less       int8 -> int8                         int8, if a has less
    2           a -> b                                   int8 -> nf4                          a
    3                                                    nf4/128 -> nf4/128

Levels that would be equal are one. By a budget alone, 4-bit formats may be rotated, which costs no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zcomm.formats import Format, get_format

__all__ = ["AS_IS", "EIGHT_BITS", "Ladder", "gradient_ladder", "weight_ladder"]

AS_IS = "none"
EIGHT_BITS = 8
BY_BUDGET = (("int8", "int8"), ("int8", "nf4"), ("nf4/128", "nf4/128"))
BY_BUDGET_ROTATED = (None, ("int8", "nf4:hadamard"), ("nf4/128:hadamard", "nf4/128:hadamard"))

Hops = tuple[str, ...]
"""The format of every hop; ``AS_IS`` on all of them stands for the tensors' own dtype."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Levels from 0, exact, to ``last``."""

    levels: tuple[Hops, ...]
    rotated: tuple[Hops | None, ...]
    """The same with a rotation, where that may be taken."""

    @property
    def last(self) -> int:
        """The level with the fewest bits."""
        return len(self.levels) - 1

    @property
    def eight_bits(self) -> int:
        """The last level that has at least 8 bits on every hop."""
        fitting = [level for level, hops in enumerate(self.levels) if min(map(_bits, hops)) >= EIGHT_BITS]
        return fitting[-1]

    @property
    def formats(self) -> tuple[str, ...]:
        """Every format whose error says which level to take."""
        hops = [name for level in (*self.levels[1:], *filter(None, self.rotated)) for name in level]
        return tuple(dict.fromkeys(name for name in hops if get_format(name).block))

    def hops(self, level: int, *, is_rotated: bool = False) -> Hops:
        """The formats of that level."""
        turned = self.rotated[level] if is_rotated else None
        return self.levels[level] if turned is None else turned

    def error(self, level: int, of_formats: Mapping[str, float], *, is_rotated: bool = False) -> float:
        """What all hops of a level lose at most, from what each format loses; 0 for what is no block format.

        Errors of hops are independent; those of ranks average out the more, the more the ranks have in common.
        """
        return math.sqrt(sum(of_formats.get(name, 0.0) ** 2 for name in self.hops(level, is_rotated=is_rotated)))


def gradient_ladder(asked: tuple[str, str] | None, *, has_budget: bool) -> Ladder | None:
    """Of a reduction that is to have the formats ``asked``, inside the node and between nodes; None: nothing to choose.

    Raises:
        FormatError: There is no such format.
    """
    if asked is None or not any(get_format(name).block for name in asked):
        if not has_budget or asked is not None:
            return None
        return Ladder(((AS_IS, AS_IS), *BY_BUDGET), (None, *BY_BUDGET_ROTATED))
    return _ladder_to(tuple(asked))


def weight_ladder(asked: str) -> Ladder | None:
    """Of a gather that is to have the format ``asked``; None: nothing to choose."""
    return _ladder_to((asked,)) if get_format(asked).block else None


def _ladder_to(asked: Hops) -> Ladder:
    eight = tuple("int8" if _bits(name) < EIGHT_BITS else name for name in asked)
    levels = tuple(dict.fromkeys([(AS_IS,) * len(asked), eight, asked]))
    return Ladder(levels, (None,) * len(levels))


def _bits(name: str) -> float:
    format: Format = get_format(name)
    return format.bits_per_element or math.inf
