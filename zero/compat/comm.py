"""``deepspeed.comm``: torch.distributed's functions, and those that only DeepSpeed has."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
import zero

logger = logging.getLogger("zero")
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"
"""Names of variables."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed unless it is initialized: see :func:`zero.init_distributed`.

    Args:
        dist_backend: Default: nccl where there is a GPU, else gloo.
        auto_mpi_discovery: Without effect: ranks are read from torchrun's environment.
        distributed_port: Used where the environment has an address but no port.
        verbose: Without effect.
        timeout: For the start, and for each exchange.
        init_method: As torch's, with ``rank`` and ``world_size``.
        dist_init_required: False: torch.distributed must be initialized already.
        config: Without effect.
        rank: This process's rank, if the environment does not say.
        world_size: The number of ranks, if the environment does not say.

    Raises:
        StateError: ``dist_init_required=False``, and torch.distributed is not initialized.
        BackendUnavailableError: nccl, without a GPU.
    """
    if dist_init_required is False and not dist.is_initialized():
        raise zcomm.StateError("torch.distributed is not initialized: dist_init_required=False")
    if dist_backend == "nccl" and not (dist.is_initialized() or torch.cuda.is_available()):
        raise zcomm.BackendUnavailableError(
            "dist_backend='nccl' needs a GPU, and there is none: leave it out, or give 'gloo'"
        )
    if dist_backend is None:
        _tell_accelerate()
    if init_method is not None and not dist.is_initialized():
        backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
        dist.init_process_group(backend, init_method, timeout=timeout, world_size=world_size, rank=rank)
        return
    if rank >= 0 and world_size > 0:
        os.environ.setdefault("RANK", str(rank))
        os.environ.setdefault("WORLD_SIZE", str(world_size))
    zero.init_distributed(dist_backend, distributed_port=distributed_port, timeout=timeout)


def is_initialized() -> bool:
    """Whether torch.distributed is initialized."""
    _tell_accelerate()  # asks this first, and initializes nothing then
    return dist.is_initialized()


def _tell_accelerate() -> None:
    """Without a GPU accelerate names no backend under DeepSpeed, and then takes every rank for the only one."""
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.PartialState._shared_state
    if "backend" in shared and shared["backend"] is None and "num_processes" not in shared:
        shared["backend"] = "gloo"


def get_local_rank() -> int:
    """This process's number on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of ``group_rank`` in ``group``; default: all ranks."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks in ``group``."""
    return dist.get_process_group_ranks(group)


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def has_all_gather_into_tensor() -> bool:
    """True: torch has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: torch has it."""
    return True


def all_gather_into_tensor(output_tensor: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """torch's, which gloo refuses for a tensor without dimensions."""
    given = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return dist.all_gather_into_tensor(output_tensor, given, group, async_op)


allgather_fn = all_gather_into_tensor
inference_all_reduce = dist.all_reduce


def configure(*_: Any, **__: Any) -> None:
    """Nothing: what engines log is set by ``comms_logger`` in their configuration."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Say where the log of exchanges is."""
    logger.info("exchanges are logged by an engine with comms_logger in its configuration, when it is destroyed")


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_model_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_group() -> None:
    return None


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_world_size() -> int:
    return 1


get_data_parallel_group, get_data_parallel_rank = _get_data_parallel_group, _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size
get_model_parallel_world_size = _get_model_parallel_world_size
