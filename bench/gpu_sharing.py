"""Initialize the process group of a benchmark whose ranks may share a GPU.

By default NCCL refuses two ranks on one GPU. NCCL 2.30 and later allow it with ``NCCL_MULTI_RANK_GPU_ENABLE``. Before,
ranks with different ``NCCL_HOSTID`` count as ranks of different machines, which exchange over sockets. Processes that
share a GPU are time-sliced, so the times of several ranks do not measure an exchange; host time and launches do not
change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zcomm import Topology, control
from zcomm._bench.harness import BenchReport, Column
from zcomm._bench.launch import process_group

__all__ = ["join_ranks", "on_first_rank", "sharing", "start_report"]

FEW_CTAS = "4"
"""CTAs of an NCCL kernel: the kernels of all ranks must fit on the GPU together, or they deadlock."""


def sharing(rank: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """Return the environment in which NCCL of version ``nccl`` lets ``rank`` share its GPU."""
    environment = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": FEW_CTAS}
    if nccl >= (2, 30):
        return environment | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return environment | {"NCCL_HOSTID": f"rank-{rank}"}


@contextmanager
def join_ranks(device: str, ranks_per_node: int | None = None) -> Iterator[tuple[Topology, torch.device]]:
    """Join the ranks; ``ranks_per_node`` consecutive ones stand in for a node, None: all ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cuda" and os.environ["WORLD_SIZE"] != "1":
        os.environ |= sharing(int(os.environ["RANK"]), tuple(torch.cuda.nccl.version()))
    with process_group(device) as of_rank:
        per_node = ranks_per_node or int(os.environ["WORLD_SIZE"])
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
        topology = Topology(ranks_per_node=per_node)
        try:
            yield topology, of_rank
        finally:
            topology.close()


def start_report(
    name: str, columns: Sequence[Column], topology: Topology, device: torch.device, *, as_json: bool, **facts: object
) -> BenchReport | None:
    """Print the context of benchmark ``name`` and return its report; None on all ranks but the first."""
    if topology.rank:
        return None
    report = BenchReport(columns, as_json=as_json)
    report.start(name, device=device.type, ranks=topology.world_size, **facts)
    return report


def on_first_rank(flag: bool, topology: Topology) -> bool:  # noqa: FBT001  (the only argument of interest)
    """Return the value of the first rank, on all ranks."""
    return bool(control.gather_float64(torch.tensor([float(flag)]), topology)[0, 0])
