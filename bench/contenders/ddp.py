"""The contender DistributedDataParallel: nothing is sharded; 16 bits by autocast, as DDP has no masters.

DDP requires the annotations of a hook to be types, not strings: no ``from __future__ import annotations`` here.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, ContenderSetup, torch_step

__all__ = ["build"]


def build(
    setup: ContenderSetup, *, gradient_as_bucket_view: bool, sends_bf16: bool = False, accumulation: int = 1
) -> Contender:
    """Wrap the model. With bucket views gradients take no memory besides DDP's buckets.

    ``sends_bf16`` rounds gradients before they are sent. With accumulation they are sent once a step (``no_sync``).
    """
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=gradient_as_bucket_view)
    if sends_bf16:
        model.register_comm_hook(None, _in_bf16)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    device = next(setup.model.parameters()).device
    autocast = torch.autocast(device.type, setup.dtype, enabled=setup.dtype != torch.float32)
    step = torch_step(model, optimizer, autocast, accumulation=accumulation, accumulates=model.no_sync)
    return Contender(step, accumulation, weights=setup.model.parameters)


def _in_bf16(state: object, bucket: GradBucket) -> Future[Tensor]:  # noqa: ARG001  (DDP's signature)
    """torch's bf16_compress_hook, rewritten because torch's refuses gloo."""
    mean = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(mean, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))
