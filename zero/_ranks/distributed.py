"""Starts torch.distributed, and says what this process has of the job: device, data-parallel group, share of the data.

One rank of a job logs what is the same on every rank. The data-parallel groups of a model that is split over tensor-
or pipeline-parallel ranks each have a first rank, so ``topology.rank == 0`` is not enough: ``Runtime.is_log_rank`` is
true on one rank of them all. What happens on one rank alone (a backward that an exception ended, a wait that timed out)
is logged by that rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from zcomm import ConfigError, StateError
from zcomm._transport.store_exchange import mark_fresh, outlives_ranks, prefix_of_start
from zero._ranks.model_parallel import ModelParallel


def is_first_of_job() -> bool:
    """Whether this process has rank 0, or is the only one. For log lines that belong to no group of ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


DATA_AXES = ("dp", "data", "data_parallel", "fsdp")


def init_distributed(
    dist_backend: str | None = None, *, distributed_port: int = 29500, timeout: timedelta | None = None
) -> None:
    """Initialize torch.distributed unless it is initialized: from torchrun's environment, else as a single process.

    The process group is destroyed when the interpreter exits. torchrun's store outlives the ranks: after a restart the
    new ranks use keys of their own in it, and do not read what the dead ones left (torch's own
    ``init_process_group()`` does, and fails over gloo).

    Args:
        dist_backend: Default: nccl where there is a GPU, else gloo.
        distributed_port: Used where the environment has an address but no port.
        timeout: For the start, and for each exchange. Default: torch's for the backend.

    Raises:
        CommunicationError: After a restart, not all ranks joined within ``timeout``.
    """
    if dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        start: dict[str, Any] = _start_over(timeout) if outlives_ranks() else {}
        dist.init_process_group(backend, timeout=timeout, **start)
        if start:
            mark_fresh()
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    # torch warns of leaked resources if an NCCL group is alive when the interpreter exits.
    atexit.register(_end)


def _start_over(timeout: timedelta | None) -> dict[str, Any]:
    """Arguments for init_process_group: a store without keys of earlier starts."""
    # Without a fresh prefix gloo reads the addresses that the dead ranks published, and connects to nobody.
    store, rank, world_size = next(rendezvous("env://", timeout=timeout or dist.default_pg_timeout))
    store.set_timeout(timeout or dist.default_pg_timeout)
    prefix = prefix_of_start(store, "zero", range(world_size), rank, timeout)
    return {"store": PrefixStore(prefix, store), "rank": rank, "world_size": world_size}


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(args: Any = None) -> torch.device:
    """This process's GPU, by ``LOCAL_RANK`` or else ``args.local_rank``; the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK", getattr(args, "local_rank", None) or 0)
    device = torch.device("cuda", max(int(local_rank), 0))
    torch.cuda.set_device(device)
    return device


class DataParallel:
    """The ranks that train on different data with the same parameters.

    Args:
        group: Their process group; None: all ranks.
        model_parallel: The ranks that hold other parts of the same model.
    """

    def __init__(self, group: dist.ProcessGroup | None, model_parallel: ModelParallel | None = None) -> None:
        self.group, self.model_parallel = group, model_parallel or ModelParallel()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)


def data_parallel(mpu: Any) -> DataParallel:
    """The data-parallel and the model-parallel ranks that ``mpu`` describes.

    Args:
        mpu: None: all ranks are data-parallel. Else a process group, an object with Megatron's methods
            (``get_data_parallel_group()``, ...), or a DeviceMesh with one axis named as in :data:`DATA_AXES`.

    Raises:
        ConfigError: ``mpu`` is none of these, or a mesh without a data axis.
    """
    if mpu is None or isinstance(mpu, dist.ProcessGroup):
        return DataParallel(mpu)
    if isinstance(mpu, DeviceMesh):
        names = mpu.mesh_dim_names or ()
        axis = next((name for name in DATA_AXES if name in names), None)
        if axis is None and mpu.ndim > 1:
            raise ConfigError(f"a mesh of several axes must name one of them {' or '.join(DATA_AXES)}: names={names}")
        return DataParallel(mpu.get_group(axis), ModelParallel.of_mesh(mpu, axis) if axis and mpu.ndim > 1 else None)
    if not hasattr(mpu, "get_data_parallel_group"):
        raise ConfigError(f"mpu must be a DeviceMesh or have get_data_parallel_group(): mpu={mpu!r}")
    return DataParallel(mpu.get_data_parallel_group(), ModelParallel.of_mpu(mpu))


class RankDataLoader:
    """Loads this rank's share of a dataset in batches. Every pass has a new shuffle, the same on every rank.

    ``state_dict()`` holds the number of passes started: after a load, the next pass is shuffled as it would have been.
    The rest of an unfinished pass is skipped.

    Args:
        dataset: A map-style dataset, the same on every rank.
        ranks: The ranks that share it.
        batch_size: Samples per batch on each rank.
        collate_fn: See torch's DataLoader.
        drop_last: Drop an incomplete last batch.
        shuffle: False: the samples in their order.
        options: Others of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        ranks: DataParallel,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise StateError(f"training_data must be a dataset with a length: training_data={type(dataset).__name__}")
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=ranks.world_size, rank=ranks.rank, shuffle=shuffle, drop_last=drop_last
        )
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=self.sampler, collate_fn=collate_fn, drop_last=drop_last, **options
        )
        self._num_passes = 0

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, int]:
        """The number of passes started."""
        return {"num_passes": self._num_passes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the pass after those of ``state``."""
        self._num_passes = int(state["num_passes"])

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._num_passes)
        self._num_passes += 1
        return iter(self.loader)
