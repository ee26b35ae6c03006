"""The contender FSDP2: ``fully_shard`` on each block and the model, over all ranks or (HSDP) those of a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step
from contenders.muon import Both, GatheredMuon, divided_muon, optimizers

__all__ = ["build"]

Setting = Literal["prefetch", "all-to-all", "one group", "bf16 gradients", "divided muon"]
"""What is not FSDP2's default.

    prefetch        a block's parameters are gathered, without streams, while the block before it computes
    all-to-all      gradients are reduced by an all-to-all: each rank sends half as much as in gloo's all-reduce
    one group       the model is gathered and reduced in one exchange each, not by blocks, and is full in backward
    bf16 gradients  gradients in float32 are reduced in bfloat16
    divided muon    the package muon-fsdp2 updates each matrix on one rank, which gathers it; not under HSDP
"""


def build(
    setup: ContenderSetup,
    *,
    reshard_after_forward: bool,
    is_hybrid: bool = False,
    accumulation: int = 1,
    has_muon: bool = False,
    recipe: str = "",
    settings: tuple[Setting, ...] = (),
) -> Contender:
    """Shard the model; parameters stay full from forward to backward, or are gathered twice.

    ``is_hybrid``: each node has a full copy of the model, sharded over its ranks (HSDP).
    ``has_muon``: Muon updates the matrices of blocks, each gathered on every rank.
    ``recipe``: this library exchanges parameters and gradients; with ``is_hybrid`` it also averages over the nodes.
    ``settings``: see :data:`Setting`.
    """
    model, is_wide = setup.model, setup.dtype == torch.float32
    mesh, replicas = _mesh(setup, is_hybrid=is_hybrid), None
    if recipe and is_hybrid:
        mesh, replicas = mesh["ranks"], mesh["nodes"].get_group()
    reduced = torch.bfloat16 if "bf16 gradients" in settings else None
    policy = MixedPrecisionPolicy(param_dtype=None if is_wide else setup.dtype, reduce_dtype=reduced)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    groups = [fully_shard(block, **options) for block in model.blocks if "one group" not in settings]
    sharded = fully_shard(model, **options)
    if "prefetch" in settings:
        sharded._set_unshard_async_op(True)
        for block, following in pairwise(groups):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    if "all-to-all" in settings:
        for module in (*groups, sharded):
            module.set_custom_reduce_scatter(_AllToAll())
    if recipe:
        topology = None if is_hybrid else setup.topology
        import_module("zcomm").install_fsdp2(model, recipe, topology=topology, replicate_group=replicas)
    if has_muon:
        muon = divided_muon if "divided muon" in settings else GatheredMuon
        optimizer: Any = Both(optimizers(model, setup.learning_rate, muon, fused=True))
    else:
        optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    accumulates = partial(_sharded_in_node if is_hybrid and reshard_after_forward else _unsharded, sharded)
    step = torch_step(model, optimizer, accumulation=accumulation, accumulates=accumulates)
    return Contender(step, accumulation, weights=lambda: (param.full_tensor() for param in model.parameters()))


class _AllToAll(DefaultReduceScatter):
    """A reduce-scatter that sends each rank only the part that this rank keeps, and sums in float32."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, **_: object
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = received.view(group.size(), -1).sum(0, dtype=torch.float32)
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)


def _mesh(setup: ContenderSetup, *, is_hybrid: bool) -> DeviceMesh:
    """A mesh of all ranks, or of [nodes, ranks of a node]."""
    device, world_size = next(setup.model.parameters()).device.type, dist.get_world_size()
    if not is_hybrid:
        return init_device_mesh(device, (world_size,))
    local = setup.topology.ranks_per_node if setup.topology is not None else int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh(device, (world_size // local, local), mesh_dim_names=("nodes", "ranks"))


@contextmanager
def _unsharded(model: FSDPModule) -> Iterator[None]:
    """Accumulate full gradients on each rank, and keep full parameters for the next forward; send nothing.

    This is fastest, but takes the memory of the full model and its gradients on each rank.
    """
    _set_last(model, is_last=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    yield
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    _set_last(model, is_last=True)


@contextmanager
def _sharded_in_node(model: FSDPModule) -> Iterator[None]:
    """Accumulate gradients sharded over the node; HSDP then reduces them between nodes once a step."""
    _set_last(model, is_last=False)
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)
    _set_last(model, is_last=True)


def _set_last(model: FSDPModule, *, is_last: bool) -> None:
    model.set_is_last_backward(is_last)
