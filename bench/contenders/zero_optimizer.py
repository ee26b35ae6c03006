"""ZeroOptimizer, by stage, with any of its switches."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step
from zcomm import Topology
from zero import ZeroOptimizer

__all__ = ["build"]


def build(setup: Setup, stage: int, *, accumulation: int = 1, stays_in_node: bool = False, **options: Any) -> Contender:
    """The model under ``stage``; ``stays_in_node``: with a secondary partition in each node (hpZ)."""
    model = setup.model.to(setup.dtype)
    if stays_in_node:
        options["hpz_partition_size"] = (setup.topology or Topology.from_env()).ranks_per_node
    optimizer = ZeroOptimizer(
        model, AdamW, topology=setup.topology, stage=stage, gradient_accumulation_steps=accumulation,
        lr=setup.learning_rate, fused=True, **options,
    )  # fmt: skip
    step = torch_step(model, optimizer, accumulation=accumulation)
    return Contender(step, accumulation, optimizer.close)
