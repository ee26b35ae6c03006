"""A contender without communication: each rank trains the model by itself."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step
from contenders.muon import Both, optimizers

__all__ = ["build"]


def build(setup: ContenderSetup, *, accumulation: int = 1, has_muon: bool = False) -> Contender:
    """Forward, backward and torch's AdamW (or Muon and AdamW) over all parameters, in the dtype of the computation."""
    model = setup.model.to(setup.dtype)
    optimizer: Any = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    if has_muon:
        optimizer = Both(optimizers(model, setup.learning_rate, fused=True))
    return Contender(torch_step(model, optimizer, accumulation=accumulation), accumulation)
