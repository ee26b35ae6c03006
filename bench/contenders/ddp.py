"""DistributedDataParallel, everything whole on every rank; 16 bit by autocast, as DDP has no masters.

DDP wants types, not strings, as annotations of a hook: this module does not postpone them.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from contenders.contender import Contender, Setup, torch_step

__all__ = ["build"]


def build(setup: Setup, *, gradient_as_bucket_view: bool, sends_bf16: bool = False, accumulation: int = 1) -> Contender:
    """The model; with views gradients have no memory beside that of DDP's buckets; they may be rounded to be sent.

    What accumulates sends its gradients once a step (``no_sync``).
    """
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=gradient_as_bucket_view)
    if sends_bf16:
        model.register_comm_hook(None, _in_bf16)
    optimizer = AdamW(model.parameters(), lr=setup.learning_rate, fused=True)
    device = next(setup.model.parameters()).device
    autocast = torch.autocast(device.type, setup.dtype, enabled=setup.dtype != torch.float32)
    step = torch_step(model, optimizer, autocast, accumulation=accumulation, accumulates=model.no_sync)
    return Contender(step, accumulation)


def _in_bf16(state: object, bucket: GradBucket) -> Future[Tensor]:  # noqa: ARG001  (DDP's signature)
    """torch's bf16_compress_hook, rewritten because torch's refuses gloo."""
    mean = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(mean, async_op=True).get_future()
    return reduced.then(lambda done: bucket.buffer().copy_(done.value()[0]))
