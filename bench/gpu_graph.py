"""Capture collectives and kernels in CUDA graphs: compare a replay with a call, bit for bit, and time both.

    python bench/gpu_ranks.py 2 bench/gpu_graph.py
    python bench/gpu_ranks.py 1 bench/gpu_graph.py --device cpu            the same; a replay is a call

Each case is called once, captured, and replayed on other values; ``#wrong`` counts elements that differ from those of a
call on the same values. ``call`` and ``replay`` are median times until the result is complete. If a capture fails, its
row has the error; later cases over the same communicator may then fail, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_collectives import topologies
from gpu_sharing import join_ranks, start_report
from torch import Tensor

import zcomm
from zcomm import Topology, control
from zcomm._bench import torch_calls
from zcomm._bench.harness import BenchReport, Column, interleave

COLUMNS = [
    Column("ranks", "ranks"),
    Column("backend", "backend"),
    Column("collective", "    collective"),
    Column("format", "format"),
    Column("size", "   size(B)", "d"),
    Column("call_us", "call(us)", ".1f", is_measurement=True),
    Column("replay_us", "replay(us)", ".1f", is_measurement=True),
    Column("unavailable", "unavailable"),
    Column("error", "error"),
]
BACKENDS = ("torch", "nccl")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--numel", type=int, default=2**20, help="elements of a rank's shard")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    return parser.parse_args()


class Case:
    """A reduce-scatter or an all-gather, from ``source`` to ``target``."""

    def __init__(self, collective: str, shapes: tuple[int, int], device: torch.device, call: Callable[..., object]):
        self.collective = collective
        self.source = torch.randn(shapes[0], device=device)
        self.target = torch.zeros(shapes[1], device=device)
        self._device, self._call = device, call

    def call(self) -> None:
        """Run the collective."""
        self._call(self.target, self.source)

    def captured(self) -> Callable[[], object]:
        """Capture a graph and return its replay; on the CPU, which has no graphs, the call itself."""
        self.call()  # creates connections and buffers, which a capture must not do
        if self._device.type != "cuda":
            return self.call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.call()
        return graph.replay

    def wrong_after(self, replay: Callable[[], object]) -> int:
        """Count elements in which a replay on new values differs from a call."""
        self.source.normal_()
        replay()
        torch_calls.finish()
        got: Tensor = self.target.clone()
        self.target.zero_()
        self.call()
        torch_calls.finish()
        return int((got != self.target).sum())


def cases(numel: int, format_name: str, topology: Topology, device: torch.device) -> list[Case]:
    """Both collectives, over all ranks."""
    full = numel * topology.world_size
    gather = partial(zcomm.all_gather_single, group=topology, format=format_name)
    scatter = partial(zcomm.reduce_scatter_single, group=topology, format=format_name)
    return [
        Case("reduce_scatter", (full, numel), device, scatter), Case("all_gather", (numel, full), device, gather)
    ]  # fmt: skip


def row(case: Case, rounds: int, topology: Topology) -> tuple[dict[str, Any], int]:
    """Capture and compare one case, and time it."""
    found: dict[str, Any] = {}
    wrong, message = 0, ""
    try:
        replay = case.captured()
        wrong = case.wrong_after(replay)
        both = {"call_us": case.call, "replay_us": replay}
        times = interleave(both, rounds=rounds, before_each=torch_calls.barrier, after_each=torch_calls.finish)
        found = {name: 1e6 * timing.p50 for name, timing in times.items()}
    except Exception as error:  # the other rows continue
        message = f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:200]}"
    errors = [text for text in control.gather_texts(message, topology) if text]
    of_all = int(control.gather_float64(torch.tensor([float(wrong)]), topology).sum())
    return ({"error": errors[0]}, 1) if errors else (found, of_all)


def run(arguments: argparse.Namespace, topology: Topology, device: torch.device, report: BenchReport | None) -> int:
    """Measure each backend, format and collective."""
    for backend, over in topologies(BACKENDS, topology, device, report).items():
        for name in arguments.formats:
            for case in cases(arguments.numel, name, over, device):
                found, wrong = row(case, arguments.rounds, topology)
                about = {"ranks": topology.world_size, "backend": backend, "collective": case.collective}
                if report is not None:
                    report.row(about | {"format": name, "size": case.source.nbytes, **found}, num_wrong=wrong)
        if over is not topology:
            over.close()
    return report.finish() if report is not None else 0


def main() -> int:
    """Join the ranks and capture; return 1 if a capture fails or a replay is wrong."""
    arguments = parse_arguments()
    with join_ranks(arguments.device) as (topology, device):
        report = start_report("gpu_graph", COLUMNS, topology, device, as_json=arguments.json, rounds=arguments.rounds)
        return run(arguments, topology, device, report)


if __name__ == "__main__":
    sys.exit(main())
