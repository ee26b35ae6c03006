"""DistributedDataParallel, everything whole on every rank; 16 bit by autocast, as DDP has no masters."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step

__all__ = ["build"]


def build(setup: Setup, *, gradient_as_bucket_view: bool) -> Contender:
    """The model; with views gradients have no memory beside that of DDP's buckets."""
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    device = next(setup.model.parameters()).device
    autocast = torch.autocast(device.type, setup.dtype, enabled=setup.dtype != torch.float32)
    return Contender(torch_step(model, optimizer, autocast))
