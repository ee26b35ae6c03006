"""The contender ZeroOptimizer, by stage, with any of its settings."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step
from zcomm import Topology
from zero import ZeroOptimizer

__all__ = ["build"]


def build(
    setup: Setup,
    stage: int,
    *,
    accumulation: int = 1,
    stays_in_node: bool = False,
    offload: str | None = None,
    **options: Any,
) -> Contender:
    """The model under ``stage``; ``stays_in_node``: with a secondary partition in each node (hpZ).

    ``offload``: where parameters and states rest: "cpu", or "nvme", in files in the set-up's folder.
    """
    model = setup.model.to(setup.dtype)
    if stays_in_node:
        options["hpz_partition_size"] = (setup.topology or Topology.from_env()).ranks_per_node
    if offload is not None:
        place = {"device": offload} if offload == "cpu" else {"device": offload, "nvme_path": setup.folder}
        params = place if offload == "cpu" else place | {"max_in_cpu": 0}
        options |= {"offload_optimizer": place, "offload_param": params}
    optimizer = ZeroOptimizer(
        model, AdamW, topology=setup.topology, stage=stage, gradient_accumulation_steps=accumulation,
        lr=setup.learning_rate, fused=True, **options,
    )  # fmt: skip
    step = torch_step(model, optimizer, accumulation=accumulation)
    return Contender(step, accumulation, optimizer.close)
