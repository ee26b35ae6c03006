"""Inference with a sharded model: everything gathered once, for loops that call the model for every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from zero.access import GatheredParameters
from zero.bucket import ShardInfo
from zero.runtime import Runtime

__all__ = ["gathered_for_generation"]


@contextmanager
def gathered_for_generation(model: nn.Module) -> Iterator[None]:
    """Hold all parameters of ``model`` whole inside the block, so that forwards without gradients do not communicate.

    Ranks may generate sequences of different lengths inside. Entering is collective.

    Args:
        model: A model whose parameters a ZeroOptimizer manages, or a part of one; of any stage.

    Cost for each rank: one all-gather of every bucket, and the memory of the whole model until the block ends.
    """
    owners: dict[Runtime, None] = {}
    for param in model.parameters():
        info: ShardInfo | None = getattr(param, "zero_shard", None)
        if info is not None:
            assert isinstance(info.owner, Runtime), "zero_shard without a runtime"
            owners[info.owner] = None
    with GatheredParameters(model.parameters()), ExitStack() as stack:
        for owner in owners:
            stack.enter_context(owner.hooks.idle_without_gradients())
        yield
