"""The parts of a ZeroOptimizer, for :mod:`zero._checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zero._optim.masters import MasterPiece
from zero._ranks.model_parallel import ModelParallel
from zero._runtime.runtime import Runtime


class OptimizerParts(NamedTuple):
    """The internals of a ZeroOptimizer: ``optimizer.parts``."""

    runtime: Runtime
    inner: Optimizer
    pieces: list[MasterPiece]
    group_of: dict[nn.Parameter, int]
    """The index of the parameter group of every trainable parameter."""
    model_parallel: ModelParallel
    fail: Callable[[Exception], None]
    """Called with an error that leaves the optimizer between two states: no step runs any more."""


def values_of(pieces: list[MasterPiece], runtime: Runtime) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
    """See :meth:`zero.ZeroOptimizer.master_pieces`."""
    for piece in pieces:
        with runtime.states_in_memory(piece.bucket):
            yield piece.param, piece.first, piece.master.clone() if piece.bucket.states.is_in_files else piece.master
