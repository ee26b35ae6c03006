"""What gradients are yet to be multiplied by: a number that the host knows, times one that may be known on a GPU alone.

Unscaling is the first, clipping the second: nobody waits for it, unless the gradients rest in host memory and are
updated there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["GradFactor"]


@dataclass(frozen=True, slots=True)
class GradFactor:
    """A factor, in float64. Values are not changed: keep one to go back to it."""

    number: float = 1.0
    coefficient: Tensor | None = None
    """A float64 scalar, on any device; None: 1."""

    def times(self, number: float) -> GradFactor:
        """This one times a number."""
        return replace(self, number=self.number * number)

    def times_coefficient(self, coefficient: Tensor) -> GradFactor:
        """This one times a scalar on a device."""
        wide = coefficient.double()
        return replace(self, coefficient=wide if self.coefficient is None else self.coefficient * wide)

    @property
    def is_one(self) -> bool:
        """Whether it is known to change nothing."""
        return self.number == 1 and self.coefficient is None

    def item(self) -> float:
        """For the host, which waits for a coefficient that is on a GPU."""
        return self.number if self.coefficient is None else self.number * self.coefficient.item()

    def scaled(self, value: Tensor) -> Tensor:
        """A float64 scalar times it."""
        return value * self.number if self.coefficient is None else value * self.number * self.coefficient

    def multiply_(self, values: Tensor) -> None:
        """Overwrite ``values`` by their products, rounded once. Only between devices does the host wait."""
        if self.coefficient is None:
            values.mul_(self.number)
            return
        dtype = torch.promote_types(values.dtype, torch.float32)
        factor = (self.coefficient * self.number).to(dtype)
        if factor.device != values.device:
            factor = factor.to(values.device)
        if dtype == values.dtype:
            values.mul_(factor)
        else:
            torch.mul(values, factor.view(1), out=values)  # in float32: a scalar would be rounded to 16 bit before
