"""Set up a benchmark's ranks: relaunch under torchrun, process group, topology."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zcomm._transport.backend_choice import BackendName
from zcomm._transport.topology import Topology


def relaunch_under_torchrun(num_ranks: int | None, command: Sequence[str] | None = None) -> None:
    """Replace this process by torchrun with ``num_ranks`` ranks of ``command``, unless torchrun has started it.

    Args:
        num_ranks: None: one rank for each GPU, or 4 without GPUs.
        command: What torchrun runs. None: the script of this process, with its arguments.
    """
    if "LOCAL_RANK" in os.environ:
        return
    ranks = num_ranks or torch.cuda.device_count() or 4
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same value and print a warning
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sys.stdout.flush()  # exec discards what is buffered
    os.execv(sys.executable, [sys.executable, *torchrun, *(sys.argv if command is None else command)])


@contextmanager
def process_group(device: str = "auto") -> Iterator[torch.device]:
    """Initialize the process group of torchrun's ranks; destroy it at the end, also after an error.

    ``device`` "cuda": NCCL for tensors on this rank's GPU, gloo for host memory; "cpu": gloo; "auto": "cuda" if there
    are GPUs.
    """
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=chosen)
    else:
        chosen = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        dist.init_process_group("gloo")
    try:
        yield chosen
    finally:
        dist.destroy_process_group()


def choose_topology(ranks_per_node: int | None, *, backend: BackendName = "torch") -> Topology:
    """Return the topology as torchrun has started it. On a single machine, each two ranks count as a node.

    ``ranks_per_node`` overrides both. Two ranks, or an odd number, are one node.
    """
    world_size, is_one_machine = dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if ranks_per_node is None and is_one_machine:
        ranks_per_node = 2 if world_size >= 4 and world_size % 2 == 0 else world_size
    if ranks_per_node is None:
        return Topology.from_env(backend=backend)
    return Topology(ranks_per_node=ranks_per_node, backend=backend)
