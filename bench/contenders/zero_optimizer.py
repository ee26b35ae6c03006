"""The contender ZeroOptimizer, at any stage, with any of its settings."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step
from contenders.muon import optimizers
from zcomm import Topology
from zero import Muon, ZeroOptimizer
from zero.utils import safe_get_full_fp32_param

__all__ = ["build"]


def build(
    setup: ContenderSetup,
    stage: int,
    *,
    accumulation: int = 1,
    has_no_sync: bool = False,
    stays_in_node: bool = False,
    offload: str | None = None,
    has_muon: bool = False,
    **options: Any,
) -> Contender:
    """Shard the model at ``stage``; ``stays_in_node`` adds a secondary partition in each node (hpZ).

    ``has_no_sync``: gradients of all batches but the last are added on each rank, and not reduced.

    ``offload`` is where parameters and states are stored: "cpu", "nvme" for files in the setup's folder, or "states":
    states in files, parameters in host memory.
    ``has_muon``: this library's Muon updates the matrices of blocks, with the bits of torch's.
    """
    model = setup.model.to(setup.dtype)
    if stays_in_node:
        options["hpz_partition_size"] = (setup.topology or Topology.from_env()).ranks_per_node
    if offload is not None:
        states: dict[str, Any] = {"device": "cpu"}
        params: dict[str, Any] = {"device": "cpu"}
        if offload in ("nvme", "states"):  # reads and writes of states overlap the update
            states = {"device": "nvme", "nvme_path": setup.folder, "pipeline_read": True, "pipeline_write": True}
        if offload == "nvme":  # no parameter stays in memory
            params = {"device": "nvme", "nvme_path": setup.folder, "max_in_cpu": 0}
        options |= {"offload_optimizer": states, "offload_param": params}
    inner: Any = AdamW
    if has_muon:
        inner = optimizers(model, setup.learning_rate, Muon, fused=True)
    else:
        options |= {"lr": setup.learning_rate, "fused": True}
    reduced = 1 if has_no_sync else accumulation
    optimizer = ZeroOptimizer(
        model, inner, topology=setup.topology, stage=stage, gradient_accumulation_steps=reduced, **options
    )
    accumulates = optimizer.no_sync if has_no_sync else nullcontext
    step = torch_step(model, optimizer, accumulation=accumulation, accumulates=accumulates)
    settle = partial(_wait_for_replicas, optimizer)
    return Contender(step, accumulation, optimizer.close, lambda: map(_master, model.parameters()), settle)


def _wait_for_replicas(optimizer: ZeroOptimizer) -> None:
    for replica in optimizer.parts.runtime.gatherer.replicas.values():
        replica.wait()


def _master(param: nn.Parameter) -> Tensor:
    master = safe_get_full_fp32_param(param)
    assert master is not None, "ZeroOptimizer manages every parameter of the model"
    return master
