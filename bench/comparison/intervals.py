"""A confidence interval that assumes nothing about the distribution of what is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["CONFIDENCE", "FEWEST", "interval"]

CONFIDENCE = 0.95
FEWEST = 6
"""The fewest values that have such an interval at this confidence."""


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The confidence interval of the median of the distribution that ``values`` are a sample of."""
    ordered, count = sorted(values), len(values)
    below, outside = 0, 0.0
    while below < count // 2:
        # The probability that exactly ``below`` values lie on one side of the median.
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - confidence:
            break
        below += 1
    first = max(below - 1, 0)
    return ordered[first], ordered[-1 - first]
