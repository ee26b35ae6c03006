"""Check collectives of ranks that share one GPU, and measure host time and kernel launches.

    python bench/gpu_ranks.py 1 bench/gpu_collectives.py
    python bench/gpu_ranks.py 4 bench/gpu_collectives.py --ranks-per-node 2 --formats none int8 --sizes-kib 64 1024
    python bench/gpu_ranks.py 2 bench/gpu_collectives.py --device cpu --sizes-kib 16         the same over gloo

A row is one collective, format, number of hops, size and backend: ``torch``, over torch.distributed's groups, or
``nccl``, zcomm's own communicator; format ``torch`` is torch.distributed's own call. Its result is checked against
exact float64 sums (``#wrong``). Then the calls of a size are timed interleaved. ``host`` is the median time until the
call returns, ``p50`` until its result is complete on the slowest rank; ``kernels`` and ``copies`` are what the first
rank's GPU ran for one call, by torch's profiler. Rows are printed after each size. A failure is a row with its error,
and its backend is not used any more. See gpu_sharing.py on ranks that share a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from gpu_budget import is_spent
from gpu_sharing import join_ranks, on_first_rank, start_report
from gpu_trace import Launches, count_launches, traced

import zcomm
from zcomm import Topology, control
from zcomm._bench import torch_calls
from zcomm._bench.checking import check
from zcomm._bench.data import Tiles
from zcomm._bench.harness import BenchReport, Column, slowest_of_ranks
from zcomm._bench.workloads import Workload, WorkloadFormats, wire_of
from zcomm._transport.backend_choice import BackendName, nccl_unavailable_reason

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
BACKENDS: tuple[BackendName, ...] = ("torch", "nccl")
COLUMNS = [
    Column("ranks", "ranks"),
    Column("backend", "backend"),
    Column("collective", "    collective"),
    Column("format", "  format"),
    Column("hops", "hops"),
    Column("size", "   size(B)", "d"),
    Column("host_us", "host(us)", ".1f", is_measurement=True),
    Column("p50_us", " p50(us)", ".1f", is_measurement=True),
    Column("over_torch", "/torch", ".2f", is_measurement=True),
    Column("kernels", "kernels", "d"),
    Column("copies", "copies", "d"),
    Column("relative_error", "relerr", ".1e"),
    Column("unavailable", "unavailable"),
    Column("error", "error"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks-per-node", type=int, help="ranks that stand in for a node; default: all")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--sizes-kib", nargs="+", type=float, default=[1024, 64, 16384], help="sizes, in this order")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    return parser.parse_args()


@dataclass
class Case:
    """One row: a call of ``workload`` in the format ``wire``; None: torch.distributed's own call."""

    workload: Workload
    wire: WorkloadFormats | None
    num_wrong: int = 0
    relative_error: float = 0.0
    launches: Launches | None = None
    host_s: list[float] = field(default_factory=list)

    def call(self) -> None:
        """Make the call, and record the host time."""
        start = time.perf_counter()
        if self.wire is None:
            self.workload.call_torch()
        else:
            self.workload.call_zcomm(self.wire)
        self.host_s.append(time.perf_counter() - start)

    def check_and_trace(self, device: torch.device) -> None:
        """Check one call, and count the launches of another."""
        self.workload.poison()
        self.call()
        torch_calls.barrier()
        self.num_wrong, self.relative_error = check(self.workload, self.wire)
        self.workload.reset()
        torch_calls.barrier()
        self.launches = count_launches(traced(self.call, device))
        self.host_s.clear()

    def row(self, backend: str) -> dict[str, Any]:
        """The row without the times over all ranks."""
        work = self.workload
        return {
            "ranks": f"{work.topology.num_nodes}x{work.topology.ranks_per_node}", "backend": backend,
            "collective": work.collective, "format": "torch" if self.wire is None else str(self.wire),
            "hops": 1 if self.wire is None else self.wire.num_hops, "size": work.nbytes,
            "host_us": 1e6 * statistics.median(self.host_s[1:]), "relative_error": self.relative_error,
            **(self.launches._asdict() if self.launches else {}),
        }  # fmt: skip


def measured(workload: Workload, arguments: argparse.Namespace, backend: BackendName) -> Iterator[tuple[Any, int]]:
    """Measure one collective and size; yield its rows."""
    hops = (2, 1) if workload.topology.has_two_hops else (1,)
    wires = [wire_of(text, count) for text, count in product(arguments.formats, hops)]
    named = {f"{wire}, {wire.num_hops}": Case(workload, wire) for wire in wires if wire is not None}
    cases = {"torch": Case(workload, None), **named}
    for case in cases.values():
        case.check_and_trace(workload.tiles.tile.device)
    calls: dict[str, Callable[[], None]] = {name: case.call for name, case in cases.items()}
    times = slowest_of_ranks(calls, workload.topology, rounds=arguments.rounds, warmup=1, reset=workload.reset)
    for name, case in cases.items():
        of_all = {"p50_us": 1e6 * times[name].p50, "over_torch": times["torch"].p50 / times[name].p50}
        yield case.row(backend) | of_all, case.num_wrong


def run(arguments: argparse.Namespace, topology: Topology, device: torch.device, report: BenchReport | None) -> int:
    """Measure every backend, size and collective. torch comes first: a hang loses all that follows."""
    tiles, skipped = Tiles(torch.bfloat16, device), []
    over = topologies(arguments.backends, topology, device, report)
    for backend, kib, collective in product(arguments.backends, arguments.sizes_kib, arguments.collectives):
        if backend not in over:
            continue
        if on_first_rank(is_spent(), topology):
            skipped.append(f"{collective} of {kib:g} KiB over {backend}")
            continue
        workload = Workload(collective, int(kib * 1024), tiles, over[backend], "avg")
        rows, error = tried(workload, arguments, backend)
        if error:
            del over[backend]
            rows = [({"backend": backend, "collective": collective, "size": workload.nbytes, "error": error}, 1)]
        for row, num_wrong in rows if report is not None else ():
            report.row(row, num_wrong=num_wrong)
    if report is None:
        return 0
    if skipped:
        report.note(f"not measured, for lack of time: {', '.join(skipped)}")
    return report.finish()


def topologies(
    backends: Sequence[str], topology: Topology, device: torch.device, report: BenchReport | None
) -> dict[str, Topology]:
    """Return a topology for each backend; print a row with the reason if one is unavailable."""
    over = {"torch": topology}
    if "nccl" not in backends:
        return over
    if reason := " ".join((nccl_unavailable_reason() or refused_by_nccl(device)).split()):
        if report is not None:
            report.row({"backend": "nccl", "unavailable": reason}, num_wrong=0)
    else:
        over["nccl"] = Topology(ranks_per_node=topology.ranks_per_node, backend="nccl")
    return over


def tried(workload: Workload, arguments: argparse.Namespace, backend: BackendName) -> tuple[list[tuple[Any, int]], str]:
    """Return the rows, or the error of any rank."""
    rows, message = [], ""
    try:
        rows = list(measured(workload, arguments, backend))
    except Exception as error:  # the other backend continues
        message = f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:200]}"
    return rows, next((text for text in control.gather_texts(message, workload.topology) if text), "")


def refused_by_nccl(device: torch.device) -> str:
    """Return why the backend refuses tensors on ``device``; empty if it takes them."""
    if device.type == "cuda":
        return ""
    try:
        zcomm.all_reduce(torch.zeros(8), format="int8", backend="nccl")
    except zcomm.ZcommError as error:
        return str(error).splitlines()[0]
    return ""


def main() -> int:
    """Join the ranks and measure; return 1 if a result is wrong."""
    arguments = parse_arguments()
    with join_ranks(arguments.device, arguments.ranks_per_node) as (topology, device):
        report = start_report(
            "gpu_collectives", COLUMNS, topology, device, as_json=arguments.json, rounds=arguments.rounds
        )
        return run(arguments, topology, device, report)


if __name__ == "__main__":
    sys.exit(main())
