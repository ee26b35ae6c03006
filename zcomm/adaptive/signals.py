"""What is watched from step to step, and what counts as a jump. Numbers only; the same on every rank if they are.

A value is compared with those before it: with their running mean, over about the last 50, once there are 10. One that
jumps is not added to them. Three in a row are no outlier but a new level: from there on they are begun anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Measured", "Running", "Signals"]

HORIZON = 50
LEAST = 10
"""Values before one can jump, unless it is not finite."""
OUTLIERS_IN_A_ROW = 3
LEAST_DEVIATION = 0.01
"""Of a loss, as a share of its mean: one that hardly moves may move by as much."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What encoding loses of one tensor, or of several that travel together."""

    errors: Mapping[str, float]
    """Relative error by format."""
    kurtosis: float
    """3 for normal numbers, more for heavy tails."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What the ranks have agreed on at the end of a step; None: not known."""

    grad_norm: float | None = None
    """The global norm before clipping, unscaled."""
    loss: float | None = None
    """The mean over the ranks."""
    residual_norm: float | None = None
    """Of what quantization has lost and is still to be added, over all ranks."""
    measured: Mapping[int, Measured] = field(default_factory=dict)
    """By group, on steps that measure."""


@dataclass(slots=True)
class Running:
    """The mean of a signal, and how far it strays from it."""

    num: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    num_jumps: int = 0
    """In a row."""

    @property
    def is_settled(self) -> bool:
        """Whether a finite value can jump."""
        return self.num >= LEAST

    def exceeds(self, value: float, times: float) -> bool:
        """Whether ``value`` is above so many times the mean, or not finite."""
        return not math.isfinite(value) or (self.is_settled and value > times * self.mean > 0)

    def strays(self, value: float, times: float) -> bool:
        """Whether ``value`` is above the mean by so many deviations, or not finite."""
        deviation = max(self.deviation, LEAST_DEVIATION * abs(self.mean))
        return not math.isfinite(value) or (self.is_settled and value - self.mean > times * deviation)

    def add(self, value: float, *, jumps: bool) -> bool:
        """Take ``value`` in; True if it and those before it are a new level."""
        if not jumps:
            self.num_jumps, self.num = 0, self.num + 1
            share = 1 / min(self.num, HORIZON)
            if self.num > 1:
                self.deviation += (abs(value - self.mean) - self.deviation) / min(self.num - 1, HORIZON)
            self.mean += (value - self.mean) * share
            return False
        self.num_jumps += 1
        if self.num_jumps < OUTLIERS_IN_A_ROW or not math.isfinite(value):
            return False
        self.num, self.mean, self.deviation, self.num_jumps = 0, 0.0, 0.0, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Numbers."""
        return {"num": self.num, "mean": self.mean, "deviation": self.deviation, "num_jumps": self.num_jumps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.num, self.num_jumps = int(state["num"]), int(state["num_jumps"])
        self.mean, self.deviation = float(state["mean"]), float(state["deviation"])
