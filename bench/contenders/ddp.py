"""The contender DistributedDataParallel: nothing is sharded; 16 bits by autocast, as DDP has no masters.

DDP requires the annotations of a hook to be types, not strings: no ``from __future__ import annotations`` here.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step
from contenders.muon import Both, optimizers

__all__ = ["ONE_BUCKET", "WHOLE_SHARE", "build", "send_by_powersgd"]

ONE_BUCKET = 1 << 20
"""MiB of a bucket for PowerSGD: it starts exchanges in gloo's threads, and those of two buckets would mix."""

WHOLE_SHARE = 0.1
"""Of a training, the steps that send whole gradients before PowerSGD starts, as torch recommends."""


def build(
    setup: ContenderSetup,
    *,
    gradient_as_bucket_view: bool,
    sends: Literal["float32", "bf16", "bf16 two hops"] = "float32",
    bucket_mib: int | None = None,
    powersgd_rank: int = 0,
    recipe: str = "",
    has_muon: bool = False,
    accumulation: int = 1,
) -> Contender:
    """Wrap the model. With bucket views gradients take no memory besides DDP's buckets.

    ``sends``: with "bf16" gradients are rounded before they are sent, and with "bf16 two hops" also added within each
    node first, as no hook of torch does; a ``powersgd_rank`` sends factors of that rank instead, in bfloat16 with
    "bf16"; with a ``recipe`` this library sends them. ``has_muon``: torch's Muon updates all matrices of
    blocks on every rank. With accumulation gradients are sent once a step (``no_sync``). ``bucket_mib``: MiB of a
    bucket; None: torch's default.
    """
    cap = ONE_BUCKET if powersgd_rank else bucket_mib
    model = DistributedDataParallel(setup.model, bucket_cap_mb=cap, gradient_as_bucket_view=gradient_as_bucket_view)
    if sends == "bf16" and not powersgd_rank:
        model.register_comm_hook(None, _in_bf16)
    if sends == "bf16 two hops":
        local = setup.topology.ranks_per_node if setup.topology is not None else int(os.environ["LOCAL_WORLD_SIZE"])
        model.register_comm_hook(Hops(local), _by_node)
    if powersgd_rank:
        # The first steps send whole gradients: the warm-up and one timed step.
        send_by_powersgd(model, powersgd_rank, first_step=2, in_bf16=sends == "bf16")
    if recipe:
        import_module("zcomm").install_ddp(model, recipe, topology=setup.topology)
    optimizer: Any = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    if has_muon:
        optimizer = Both(optimizers(setup.model, setup.learning_rate, fused=True))
    step = torch_step(model, optimizer, setup.autocast(), accumulation=accumulation, accumulates=model.no_sync)
    return Contender(step, accumulation, weights=setup.model.parameters)


def _in_bf16(state: object, bucket: GradBucket) -> Future[Tensor]:  # noqa: ARG001  (DDP's signature)
    """torch's bf16_compress_hook, rewritten because torch's refuses gloo."""
    mean = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(mean, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class Hops:
    """Averages a bucket in bfloat16: adds it inside each node, then over the nodes, where a rank sends one part of it.

    Each hop has one thread and one process group. So buckets are in the same order on all ranks, and while one is in
    the second hop the next is in the first.
    """

    def __init__(self, per_node: int) -> None:
        nodes = dist.get_world_size() // per_node
        mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("nodes", "ranks"))
        self._nodes, self._count = mesh.get_group("nodes"), per_node
        ranks = [[node * per_node + local for local in range(per_node)] for node in range(nodes)]
        self._add, self._gather = (dist.new_subgroups_by_enumeration(ranks)[0] for _ in range(2))
        self._threads = [ThreadPoolExecutor(1) for _ in range(3)]

    def start(self, buffer: Tensor) -> Future[Tensor]:
        """Start with a float32 bucket, which holds the mean over all ranks when the future is done."""
        parts = torch.zeros(self._count, -(-buffer.numel() // self._count), dtype=torch.bfloat16)
        torch.mul(buffer, 1 / dist.get_world_size(), out=parts.view(-1)[: buffer.numel()])
        done: Future[Tensor] = Future()
        self._threads[0].submit(self._hop, 0, parts, buffer, done)
        return done

    def _hop(
        self, number: int, parts: Tensor, buffer: Tensor, done: Future[Tensor], mine: Tensor | None = None
    ) -> None:
        try:
            if mine is None:
                received = torch.empty_like(parts)
                dist.all_to_all_single(received, parts, group=self._add)
                mine = received.sum(0)
            elif number == 1:
                dist.all_reduce(mine, group=self._nodes)
            else:
                dist.all_gather(list(parts), mine, group=self._gather)
                done.set_result(buffer.copy_(parts.view(-1)[: buffer.numel()]))
                return
            self._threads[number + 1].submit(self._hop, number + 1, parts, buffer, done, mine)
        except Exception as error:  # else the rank would wait for the bucket for ever
            done.set_exception(error)


def _by_node(hops: Hops, bucket: GradBucket) -> Future[Tensor]:
    return hops.start(bucket.buffer())


def _powersgd_in_bf16(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """torch's bf16_compress_wrapper, rewritten because torch's refuses gloo."""
    wide = bucket.buffer()
    bucket.set_buffer(wide.to(torch.bfloat16))
    return powerSGD_hook(state, bucket).then(lambda done: wide.copy_(done.value()))


def send_by_powersgd(
    model: DistributedDataParallel, rank: int, *, first_step: int, in_bf16: bool = False
) -> PowerSGDState:
    """Let ``model`` send factors of its gradients, of rank ``rank``, from ``first_step`` on, which is at least 2.

    What the factors lack is added to the next gradients. ``in_bf16``: gradients are rounded first, so factors and what
    they lack are in bfloat16, too.
    """
    state = PowerSGDState(None, rank, first_step)
    model.register_comm_hook(state, _powersgd_in_bf16 if in_bf16 else powerSGD_hook)
    return state
