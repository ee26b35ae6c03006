"""A contender without communication: each rank trains the model by itself."""

from __future__ import annotations

from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step

__all__ = ["build"]


def build(setup: ContenderSetup, *, accumulation: int = 1) -> Contender:
    """Forward, backward and torch's AdamW over all parameters, in the dtype of the computation."""
    model = setup.model.to(setup.dtype)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    return Contender(torch_step(model, optimizer, accumulation=accumulation), accumulation)
