"""Ranks for a script of this folder: started by torchrun, joined in one process group, always left in order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zcomm import Topology


def relaunch_under_torchrun(num_ranks: int | None) -> None:
    """Replace this process by torchrun with ``num_ranks`` ranks of the same command, unless torchrun started it.

    None: one rank for each GPU, or 4 where there is none.
    """
    if "LOCAL_RANK" in os.environ:
        return
    ranks = num_ranks or torch.cuda.device_count() or 4
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same and print a warning
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *sys.argv]
    os.execv(sys.executable, [sys.executable, *command])


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join torchrun's ranks (NCCL where there are GPUs, else gloo) and leave again, also after an error."""
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def choose_topology(ranks_per_node: int | None) -> Topology:
    """Return the nodes that torchrun started; on a single machine, let each two ranks stand in for a node.

    ``ranks_per_node`` overrides both. An odd number of ranks, or two, stay one node.
    """
    world_size, is_one_machine = dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if ranks_per_node is None and is_one_machine:
        ranks_per_node = 2 if world_size >= 4 and world_size % 2 == 0 else world_size
    return Topology.from_env() if ranks_per_node is None else Topology(ranks_per_node=ranks_per_node)
