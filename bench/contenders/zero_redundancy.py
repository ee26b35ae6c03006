"""The contender ZeroRedundancyOptimizer under DDP: each rank updates some parameters and keeps their states."""

from __future__ import annotations

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step

__all__ = ["build"]


def build(setup: ContenderSetup) -> Contender:
    """Wrap the model in DDP; 16 bits by autocast, as DDP has no masters."""
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=setup.learning_rate, fused=True)
    return Contender(torch_step(model, optimizer, setup.autocast()), weights=setup.model.parameters)
