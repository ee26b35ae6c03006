"""ZeroOptimizer, by stage."""

from __future__ import annotations

from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step
from zero import ZeroOptimizer

__all__ = ["build"]


def build(setup: Setup, stage: int) -> Contender:
    """The model under ``stage``."""
    model = setup.model.to(setup.dtype)
    optimizer = ZeroOptimizer(model, AdamW, stage=stage, lr=setup.learning_rate, fused=True)
    return Contender(torch_step(model, optimizer), optimizer.close)
