"""The contender ZeroRedundancyOptimizer under DDP: each rank updates some parameters and keeps their states."""

from __future__ import annotations

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step

__all__ = ["build"]


def build(setup: ContenderSetup, *, has_parameter_views: bool = False) -> Contender:
    """Wrap the model in DDP; 16 bits by autocast, as DDP has no masters.

    ``has_parameter_views``: each rank's parameters are views of one buffer, which it broadcasts; without, one by one.
    """
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, parameters_as_bucket_view=has_parameter_views, lr=setup.learning_rate, fused=True
    )
    return Contender(torch_step(model, optimizer, setup.autocast()), weights=setup.model.parameters)
