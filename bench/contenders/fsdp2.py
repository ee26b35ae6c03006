"""FSDP2: ``fully_shard`` on each block and on the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step

__all__ = ["build"]


def build(setup: Setup, *, reshard_after_forward: bool) -> Contender:
    """The model, whose parameters are whole from forward to backward, or gathered twice."""
    model = setup.model
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    is_wide = setup.dtype == torch.float32
    policy = MixedPrecisionPolicy() if is_wide else MixedPrecisionPolicy(param_dtype=setup.dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    return Contender(torch_step(model, optimizer))
