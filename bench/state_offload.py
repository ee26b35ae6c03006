"""Time the optimizer step with states on NVMe, compared with computation and I/O, which should overlap.

    python bench/state_offload.py FOLDER [--numel-millions 100] [--rounds 7] [--keep-previous] [--json]

Each round times three cases: ``update`` is the optimizer step with states in host memory; ``fio`` reads and writes as
many bytes as the step moves, at the same time (1 MiB, O_DIRECT, depth 16); ``step`` is the step with masters, moments
and gradients in files. ``/max`` is ``step`` over the larger of the other two, the median over the rounds; 1 is a
perfect overlap. fio's file is as large as the step's. ``#wrong`` counts parameters that differ from those with states
in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import zero
from zcomm import Topology
from zcomm._bench.harness import BenchReport, Column
from zcomm._bench.launch import process_group, relaunch_under_torchrun
from zero._storage.transfer_counters import moved

COLUMNS = [
    Column("states", "states"),
    Column("read_mb", "read(MB)", ".0f"),
    Column("written_mb", "written(MB)", ".0f"),
    Column("update_ms", "update(ms)", ".0f", is_measurement=True),
    Column("fio_ms", "fio(ms)", ".0f", is_measurement=True),
    Column("step_ms", "step(ms)", ".0f", is_measurement=True),
    Column("over_max", "/max", ".3f", is_measurement=True),
]
WIDTH = 4096


class Rows(nn.Module):
    """Matrices of any total size, whose gradients are cheap to compute."""

    def __init__(self, numel: int) -> None:
        """Round ``numel`` to matrices of 8 million elements."""
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(2048, WIDTH, dtype=torch.bfloat16) * 0.02)
            for _ in range(max(numel // (2048 * WIDTH), 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [WIDTH] to a scalar."""
        return torch.stack([(weight @ x).float().square().sum() for weight in self.weights]).sum()


class Training:
    """One model, its states in host memory or in files."""

    def __init__(self, options: argparse.Namespace, topology: Topology, offload: dict[str, object]) -> None:
        torch.manual_seed(0)
        self.model = Rows(int(options.numel_millions * 1e6))
        self.optimizer = zero.ZeroOptimizer(
            self.model,
            zero.CPUAdam,
            topology=topology,
            stage=2,
            lr=1e-3,
            bf16={"enabled": True},
            gradient_dtype=torch.bfloat16,
            keep_previous_states=options.keep_previous,
            offload_optimizer=offload,
            fp32_optimizer_states=not options.bf16_moments,
        )

    def prepare(self) -> None:
        """Compute the gradients, the same ones in both models."""
        self.optimizer.zero_grad()
        self.model(torch.linspace(-1, 1, WIDTH).bfloat16()).backward()

    def step(self) -> float:
        """Run a step; return its seconds."""
        self.prepare()
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start


class Fio:
    """Reads and writes of the given bytes, at the same time, by fio."""

    def __init__(self, folder: Path, read: int, written: int) -> None:
        self.path = folder / f"bench-state-offload-fio-{os.getpid()}"
        self.nbytes = (read + written) >> 20 << 20
        engines = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=True).stdout
        engine = "io_uring" if "io_uring" in engines.split() else "libaio"
        self.arguments = [
            "fio", "--name=bench", f"--filename={self.path}", f"--size={self.nbytes}", "--bs=1M", "--iodepth=16",
            "--direct=1", f"--ioengine={engine}", "--output-format=json",
        ]  # fmt: skip
        self.share = round(100 * read / (read + written))
        self._run("write")

    def _run(self, mode: str, *more: str) -> float:
        done = subprocess.run([*self.arguments, f"--rw={mode}", *more], capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return max(float(job["read"]["runtime"]), float(job["write"]["runtime"])) / 1e3

    def run(self) -> float:
        """Return the seconds that fio measured."""
        return self._run("rw", f"--rwmixread={self.share}")

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def bench(options: argparse.Namespace, topology: Topology, report: BenchReport) -> None:
    """Measure and print the row."""
    files = {"device": "nvme", "nvme_path": str(options.folder), "pipeline_read": True, "pipeline_write": True}
    in_memory, in_files = Training(options, topology, {"device": "cpu"}), Training(options, topology, files)
    fio = None
    try:
        for training in (in_memory, in_files):
            training.step()
        in_files.prepare()
        in_memory.step()
        with moved() as window:
            in_files.optimizer.step()
        read, written = window.bytes(link="read"), window.bytes(link="write")
        fio = Fio(options.folder, read, written)
        seconds: dict[str, list[float]] = {"update": [], "fio": [], "step": []}
        for _ in range(options.rounds):
            seconds["update"].append(in_memory.step())
            seconds["fio"].append(fio.run())
            seconds["step"].append(in_files.step())
        pairs = zip(in_memory.model.parameters(), in_files.model.parameters(), strict=True)
        num_wrong = sum(int((a != b).sum()) for a, b in pairs)
        ratios = [step / max(one, other) for one, other, step in zip(*seconds.values(), strict=True)]
        row: dict[str, object] = {f"{name}_ms": 1e3 * statistics.median(of) for name, of in seconds.items()}
        row |= {"states": "2 places" if options.keep_previous else "1 place", "over_max": statistics.median(ratios)}
        row |= {"read_mb": read / 1e6, "written_mb": written / 1e6}
        report.row(row, num_wrong=num_wrong)
    finally:
        for training in (in_memory, in_files):
            training.optimizer.close()
        if fio is not None:
            fio.close()


def main() -> int:
    """Run the benchmark; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder on the disk to measure")
    parser.add_argument("--numel-millions", type=float, default=100, help="parameters (default 100)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep-previous", action="store_true", help="keep two copies of each sub-group, as by default")
    parser.add_argument("--bf16-moments", action="store_true")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    options = parser.parse_args()
    relaunch_under_torchrun(1)
    with process_group():
        topology = Topology(ranks_per_node=1)
        report = BenchReport(COLUMNS, as_json=options.json)
        report.start("state_offload", numel_millions=options.numel_millions, rounds=options.rounds)
        bench(options, topology, report)
        topology.close()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
