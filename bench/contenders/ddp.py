"""DistributedDataParallel, everything whole on every rank; 16 bit by autocast, as DDP has no masters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, Setup

__all__ = ["build"]


def build(setup: Setup, *, gradient_as_bucket_view: bool) -> Contender:
    """The model; with views gradients have no memory beside that of DDP's buckets."""
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, setup.dtype, enabled=setup.dtype != torch.float32):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender(step)
