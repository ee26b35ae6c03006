"""Check a collective's result: each element against the exact one, and replicated results against other ranks."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch

from zcomm import control
from zcomm._bench.workloads import Workload, WorkloadFormats
from zcomm._transport.topology import Topology

COMPARED_NUMEL = 2**16
"""Elements in one checksum that ranks compare."""


class Verdict(NamedTuple):
    """The outcome of a check, summed over all ranks."""

    num_wrong: int
    """Elements whose error exceeds the format's bound, that are NaN, or in a piece that differs between ranks."""
    relative_error: float
    """Norm of the error over the norm of the exact result."""


def check(workload: Workload, wire: WorkloadFormats | None) -> Verdict:
    """Check the output of the last call; every rank returns the same. ``wire`` None: torch's own call."""
    num_wrong, squared_error, squared_norm = _check_parts(workload, wire)
    if workload.is_replicated and wire is not None:
        num_wrong += _count_differing(workload)
    mine = torch.tensor([num_wrong, squared_error, squared_norm], dtype=torch.float64)
    of_all = control.gather_float64(mine, workload.topology).sum(0).tolist()
    return Verdict(int(of_all[0]), math.sqrt(of_all[1] / of_all[2]) if of_all[2] else 0.0)


def _check_parts(workload: Workload, wire: WorkloadFormats | None) -> tuple[int, float, float]:
    blocks = [1] if wire is None else [format.block or 1 for format in (wire.inside, wire.between)]
    step = -(-(2**20) // math.lcm(*blocks)) * math.lcm(*blocks)
    num_wrong, squared_error, squared_norm = 0, 0.0, 0.0
    for part in workload.parts():
        for start in range(0, part.numel, step):
            stop = min(start + step, part.numel)
            exact = workload.exact(part, start, stop)
            found = workload.output[part.start + start : part.start + stop].double()
            error = (found - exact).abs()
            num_wrong += int((~(error <= workload.bound(part, start, stop, wire))).sum())  # `not <=`: NaN is wrong
            squared_error += float(error.square().sum())
            squared_norm += float(exact.square().sum())
    return num_wrong, squared_error, squared_norm


def _count_differing(workload: Workload) -> int:
    """Elements in pieces that differ from the first rank's; the first of the node for a secondary gather."""
    pieces = torch.split(workload.output, COMPARED_NUMEL)
    contents = (memoryview(piece.view(torch.uint8).cpu().numpy()) for piece in pieces)  # type: ignore[arg-type]
    sums = torch.tensor([zlib.crc32(content) for content in contents], dtype=torch.float64)
    t: Topology = workload.topology
    first = t.rank - t.local_rank if workload.collective == "secondary_gather" else 0
    differs = control.gather_float64(sums, t)[first] != sums
    return sum(piece.numel() for piece, differs_here in zip(pieces, differs.tolist(), strict=True) if differs_here)
