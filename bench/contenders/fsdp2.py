"""The contender FSDP2: ``fully_shard`` on each block and the model, over all ranks or (HSDP) those of a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step

__all__ = ["build"]


def build(setup: Setup, *, reshard_after_forward: bool, is_hybrid: bool = False, accumulation: int = 1) -> Contender:
    """The model, whose parameters are whole from forward to backward, or gathered twice.

    ``is_hybrid``: each node has all of the model, divided over its ranks (HSDP).
    """
    model, is_wide = setup.model, setup.dtype == torch.float32
    mesh = _mesh(setup, is_hybrid=is_hybrid)
    policy = MixedPrecisionPolicy() if is_wide else MixedPrecisionPolicy(param_dtype=setup.dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for block in model.blocks:
        fully_shard(block, **options)
    sharded = fully_shard(model, **options)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    accumulates = partial(_in_the_node if is_hybrid and reshard_after_forward else _on_the_rank, sharded)
    return Contender(torch_step(model, optimizer, accumulation=accumulation, accumulates=accumulates), accumulation)


def _mesh(setup: Setup, *, is_hybrid: bool) -> DeviceMesh:
    """All ranks, or [nodes, ranks of a node]."""
    device, world_size = next(setup.model.parameters()).device.type, dist.get_world_size()
    if not is_hybrid:
        return init_device_mesh(device, (world_size,))
    local = setup.topology.ranks_per_node if setup.topology is not None else int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh(device, (world_size // local, local), mesh_dim_names=("nodes", "ranks"))


@contextmanager
def _on_the_rank(model: FSDPModule) -> Iterator[None]:
    """Nothing is sent after this backward: gradients stay whole, and so do parameters, for the next forward.

    Fastest, with the memory of a whole model and its gradients on each rank.
    """
    _set_last(model, is_last=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    yield
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    _set_last(model, is_last=True)


@contextmanager
def _in_the_node(model: FSDPModule) -> Iterator[None]:
    """HSDP reduces gradients inside the node, where they rest divided; between nodes once a step."""
    _set_last(model, is_last=False)
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)
    _set_last(model, is_last=True)


def _set_last(model: FSDPModule, *, is_last: bool) -> None:
    model.set_is_last_backward(is_last)
