"""torch.distributed's own uncompressed collectives, the baseline of every benchmark."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

all_to_all = dist.all_to_all_single
# torch 2.13 has renamed these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def finish() -> None:
    """Synchronize this rank's GPU, if CUDA is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def barrier() -> None:
    """Wait for all ranks and the work that is queued on their GPUs."""
    finish()
    dist.barrier()


def reduce_scatter(output: Tensor, full: Tensor, divisor: int) -> None:
    """Sum, then divide: gloo has no ReduceOp.AVG."""
    _scatter(output, full)
    if divisor != 1:
        output.div_(divisor)


def all_reduce(tensor: Tensor, divisor: int) -> None:
    dist.all_reduce(tensor)
    if divisor != 1:
        tensor.div_(divisor)
