"""The parts of a ZeroOptimizer, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from zero.masters import MasterPiece
from zero.model_parallel import ModelParallel
from zero.runtime import Runtime

__all__ = ["Inside"]


class Inside(NamedTuple):
    """What a ZeroOptimizer is made of, for checkpoints."""

    runtime: Runtime
    inner: Optimizer
    pieces: list[MasterPiece]
    group_of: dict[nn.Parameter, int]
    """The parameter group of every trainable parameter, by its number."""
    model_parallel: ModelParallel
    fail: Callable[[Exception], None]
