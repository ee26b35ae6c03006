"""The contender DistributedDataParallel: nothing is sharded; 16 bits by autocast, as DDP has no masters.

DDP requires the annotations of a hook to be types, not strings: no ``from __future__ import annotations`` here.
"""

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
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
    sends_bf16: bool = False,
    powersgd_rank: int = 0,
    recipe: str = "",
    has_muon: bool = False,
    accumulation: int = 1,
) -> Contender:
    """Wrap the model. With bucket views gradients take no memory besides DDP's buckets.

    ``sends_bf16`` rounds gradients before they are sent; a ``powersgd_rank`` sends factors of that rank instead; with a
    ``recipe`` this library sends them. ``has_muon``: torch's Muon updates all matrices of blocks on every rank. With
    accumulation gradients are sent once a step (``no_sync``).
    """
    cap = ONE_BUCKET if powersgd_rank else None
    model = DistributedDataParallel(setup.model, bucket_cap_mb=cap, gradient_as_bucket_view=gradient_as_bucket_view)
    if sends_bf16:
        model.register_comm_hook(None, _in_bf16)
    if powersgd_rank:
        send_by_powersgd(model, powersgd_rank, first_step=2)  # after the warm-up and one timed step
    if recipe:
        import_module("zcomm").install_ddp(model, recipe, topology=setup.topology)
    optimizer: Any = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    if has_muon:
        optimizer = Both(optimizers(setup.model, setup.learning_rate, fused=True))
    device = next(setup.model.parameters()).device
    autocast = torch.autocast(device.type, setup.dtype, enabled=setup.dtype != torch.float32)
    step = torch_step(model, optimizer, autocast, accumulation=accumulation, accumulates=model.no_sync)
    return Contender(step, accumulation, weights=setup.model.parameters)


def _in_bf16(state: object, bucket: GradBucket) -> Future[Tensor]:  # noqa: ARG001  (DDP's signature)
    """torch's bf16_compress_hook, rewritten because torch's refuses gloo."""
    mean = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(mean, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def send_by_powersgd(model: DistributedDataParallel, rank: int, *, first_step: int) -> PowerSGDState:
    """Let ``model`` send factors of its gradients, of rank ``rank``, from ``first_step`` on, which is at least 2.

    What the factors lack is added to the next gradients.
    """
    state = PowerSGDState(None, rank, first_step)
    model.register_comm_hook(state, powerSGD_hook)
    return state
