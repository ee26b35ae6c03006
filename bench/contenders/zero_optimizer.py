"""ZeroOptimizer, by stage."""

from __future__ import annotations

from torch import Tensor
from torch.optim import AdamW

from contenders.contender import Contender, Setup
from zero import ZeroOptimizer

__all__ = ["build"]


def build(setup: Setup, stage: int) -> Contender:
    """The model under ``stage``."""
    model = setup.model.to(setup.dtype)
    optimizer = ZeroOptimizer(model, AdamW, stage=stage, lr=setup.learning_rate, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(step, optimizer.close)
