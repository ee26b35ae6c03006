"""What a model is made of, for a planner: parameters that are gathered together."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Unit"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters of one kind that are gathered together, ``repeats`` times the same."""

    numels: tuple[int, ...]
    """Elements of each parameter."""
    repeats: int = 1
    is_trainable: bool = True
    is_layer: bool = False
    """Whether it is there once for each layer of the model."""

    @property
    def numel(self) -> int:
        """Elements of one."""
        return sum(self.numels)
