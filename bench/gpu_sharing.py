"""Initialize the process group of a benchmark whose ranks may share a GPU.

NCCL refuses two ranks on one GPU unless it is told: from 2.30 on by ``NCCL_MULTI_RANK_GPU_ENABLE``; before, ranks with
different ``NCCL_HOSTID`` are taken for ranks of different machines, which exchange over sockets. Processes that share a
GPU take turns, so times of several ranks are no measure of an exchange; the host's time and the launches are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zcomm import Topology, control
from zcomm._bench.harness import BenchReport, Column
from zcomm._bench.launch import process_group

__all__ = ["agreed", "begun", "joined", "sharing"]

FEW_CTAS = "4"
"""Of an NCCL kernel: those of all ranks have to fit on the GPU."""


def sharing(rank: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """What NCCL of version ``nccl`` has to be told for ``rank`` to share its GPU."""
    told = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": FEW_CTAS}
    if nccl >= (2, 30):
        return told | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return told | {"NCCL_HOSTID": f"rank-{rank}"}


@contextmanager
def joined(device: str, ranks_per_node: int | None = None) -> Iterator[tuple[Topology, torch.device]]:
    """Join the ranks; so many consecutive ones stand in for a node, None: all of them."""
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


def begun(
    name: str, columns: Sequence[Column], topology: Topology, device: torch.device, *, as_json: bool, **facts: object
) -> BenchReport | None:
    """The report of benchmark ``name``, whose context has been printed; None on all ranks but the first."""
    if topology.rank:
        return None
    report = BenchReport(columns, as_json=as_json)
    report.start(name, device=device.type, ranks=topology.world_size, **facts)
    return report


def agreed(is_so: bool, topology: Topology) -> bool:  # noqa: FBT001  (one rank's answer is all there is)
    """Whether it is so on the first rank; the same on all."""
    return bool(control.gather_float64(torch.tensor([float(is_so)]), topology)[0, 0])
