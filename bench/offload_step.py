"""Time a training step with states on the device, in host memory (also with delayed updates), and in files.

    python bench/offload_step.py                             1 rank, computing on one thread: the update has a core
    python bench/offload_step.py --num-ranks 2               2 ranks; on 2 cores, computation and update share them
    python bench/offload_step.py --folder /mnt/fast          where the files go

All cases have the same model, batches and ``zero.CPUAdam``, and are interleaved: a round is ``--steps`` steps of each.
The first step of a round is not timed, and the round ends when its last update is complete. Times are medians over all
timed steps:

    step      the full step                  compute   forward and backward         update    step() and zero_grad()
    /max      step over max(compute, update) of "cpu", which does not overlap them: 1 is a perfect overlap, and
              (compute + update) / max is no overlap
    /max io   of "nvme": step() over max(I/O alone, update of "cpu"); I/O alone moves the same bytes through the same
              files, reading and writing together, without an update

``down`` and ``up`` are bytes to and from the host per step and parameter of a rank. ``#wrong`` counts losses that
differ from those of "no offload" in any bit, or with the delayed update by more than ``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders.job import batch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from torch import Tensor

import zcomm
import zero
from zcomm import Topology
from zcomm._bench.harness import BenchReport, Column
from zcomm._bench.launch import process_group, relaunch_under_torchrun
from zero import ZeroOptimizer
from zero._storage.file_store import FileStore, Transfer
from zero._storage.tier_settings import FileSettings
from zero._storage.transfer_counters import moved

TOLERANCE = 2e-2  # relative
TRANSFER_NBYTES, IN_FLIGHT = 4 * 2**20, 6
COLUMNS = [
    Column("case", "case".rjust(14)),
    Column("step_ms", "step(ms)", ".1f", is_measurement=True),
    Column("compute_ms", "compute(ms)", ".1f", is_measurement=True),
    Column("update_ms", "update(ms)", ".1f", is_measurement=True),
    Column("over_max", "/max", ".3f", is_measurement=True),
    Column("io_ms", "io(ms)", ".1f", is_measurement=True),
    Column("over_io", "/max io", ".3f", is_measurement=True),
    Column("down", "down(B)", ".2f"),
    Column("up", "up(B)", ".2f"),
    Column("disk", "disk(B)", ".1f"),
    Column("loss", "loss", ".5f"),
]


@dataclass
class Case:
    """One way to store the states, with the times of its steps."""

    name: str
    model: GPT
    optimizer: ZeroOptimizer
    num_steps: int = 0
    loss: float = float("nan")
    compute_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    down: float = 0.0
    up: float = 0.0
    disk: float = 0.0

    @property
    def step_s(self) -> float:
        """Median over all timed steps."""
        return statistics.median(c + u for c, u in zip(self.compute_s, self.update_s, strict=True))

    def round(self, arguments: argparse.Namespace, topology: Topology) -> None:
        """Run the steps of a round, the first one not timed, and wait for the last update."""
        with moved() as window:
            for index in range(arguments.steps):
                tokens, targets = batch(arguments, self.num_steps, topology.rank, torch.device("cpu"))
                zcomm.all_reduce(torch.zeros(1), group=topology)  # the ranks start together
                start = time.perf_counter()
                loss: Tensor = self.model(tokens, targets)
                loss.backward()
                middle = time.perf_counter()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if index:
                    self.compute_s.append(middle - start)
                    self.update_s.append(time.perf_counter() - middle)
                self.num_steps += 1
            self.optimizer.finish_update()
        own = sum(bucket.layout.shard_numel for bucket in self.optimizer.parts.runtime.buckets) * arguments.steps
        self.down = window.bytes(link="to_host") / own
        self.up = window.bytes(link="to_device") / own
        self.disk = (window.bytes(link="read") + window.bytes(link="write")) / own
        mean = loss.detach().float().reshape(1)
        zcomm.all_reduce(mean, "avg", group=topology)
        self.loss = mean.item()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", "--nproc", type=int, default=1, help="number of ranks, without torchrun")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank, and of each rank's update")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-attention-heads", type=int, default=12)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per step and rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of each case in a round, at least 2")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary one)")
    parser.add_argument("--no-files", action="store_true", help="leave out the case of NVMe")
    parser.add_argument("--json", action="store_true", help="the same rows as JSON lines")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.rounds < 1:
        parser.error("--steps must be at least 2 and --rounds at least 1: the first step of a round is not timed")
    return arguments


def build_cases(arguments: argparse.Namespace, topology: Topology, folder: Path) -> list[Case]:
    """Build every case, with the same initial parameters in bfloat16."""
    shape = {name: getattr(arguments, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    matmul_dtype = choose_matmul_dtype(torch.bfloat16, torch.device("cpu"))
    config = GPTConfig(**shape, seq_length=arguments.seq_length, matmul_dtype=matmul_dtype)
    host: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    files = {"device": "nvme", "nvme_path": str(folder), "pipeline_read": True, "pipeline_write": True}
    of_case: dict[str, dict[str, Any]] = {
        "no offload": {},
        "cpu": host,
        "cpu delayed": host | {"delayed_update": True, "delay_start": 0},
        "nvme": {"offload_optimizer": files},
    }
    if arguments.no_files:
        del of_case["nvme"]
    cases = []
    for name, options in of_case.items():
        torch.manual_seed(1)
        model = GPT(config).bfloat16()
        optimizer = ZeroOptimizer(
            model, zero.CPUAdam, topology=topology, stage=arguments.stage, lr=1e-4, weight_decay=0.1, **options
        )
        cases.append(Case(name, model, optimizer))
    return cases


class PlainFiles:
    """Files of the size that a step moves, read and written at the same time without an update."""

    def __init__(self, folder: Path, topology: Topology, nbytes: int) -> None:
        self.store = FileStore(folder, files=FileSettings(), name="bench", topology=topology)
        self.count = max(nbytes // TRANSFER_NBYTES, 1)
        self.file = self.store.create_all({"data": 2 * self.count * TRANSFER_NBYTES})["data"]
        self.buffers = [self.store.buffer(TRANSFER_NBYTES) for _ in range(2 * IN_FLIGHT)]
        self.seconds: list[float] = []
        self.move()  # space never written is read without the disk
        self.seconds.clear()

    def move(self) -> None:
        """Read one half of the file while writing the other."""
        transfers: deque[Transfer] = deque()
        start = time.perf_counter()
        for index in range(self.count):
            pair = self.buffers[2 * (index % IN_FLIGHT) :][:2]
            if len(transfers) == 2 * IN_FLIGHT:
                transfers.popleft().wait()
                transfers.popleft().wait()
            transfers.append(self.store.read(self.file, index * TRANSFER_NBYTES, pair[0]))
            transfers.append(self.store.write(self.file, (self.count + index) * TRANSFER_NBYTES, pair[1]))
        while transfers:
            transfers.popleft().wait()
        self.seconds.append(time.perf_counter() - start)


def report(arguments: argparse.Namespace, cases: list[Case], files: PlainFiles | None, world_size: int) -> int:
    """Print one row a case; return the exit status."""
    table, of = BenchReport(COLUMNS, as_json=arguments.json), {case.name: case for case in cases}
    num_cores = len(os.sched_getaffinity(0))
    table.start("offload_step", world_size=world_size, stage=arguments.stage, dtype="bfloat16", cores=num_cores)
    needed = 2 * world_size * arguments.threads
    has_cores = f"the update has separate cores: {needed} threads on {num_cores} cores"
    shares = f"computation and update share cores: {needed} threads on {num_cores} cores, /max cannot get close to 1"
    table.note(has_cores if needed <= num_cores else shares)
    numel = sum(slot.numel for bucket in cases[0].optimizer.parts.runtime.buckets for slot in bucket.layout.slots)
    table.note(f"parameters {numel:,}  batch {arguments.batch_size} x {arguments.seq_length} per rank  interleaved")
    compute_s = statistics.median(of["cpu"].compute_s)
    update_s = statistics.median(of["cpu"].update_s)
    for case in cases:
        limit = TOLERANCE * abs(of["no offload"].loss) if case.name == "cpu delayed" else 0.0
        values = {
            "case": case.name,
            "step_ms": 1e3 * case.step_s,
            "compute_ms": 1e3 * statistics.median(case.compute_s),
            "update_ms": 1e3 * statistics.median(case.update_s),
            "over_max": case.step_s / max(compute_s, update_s),
            "down": case.down,
            "up": case.up,
            "disk": case.disk,
            "loss": case.loss,
        }
        if files is not None and case.name == "nvme":
            io_s = statistics.median(files.seconds)
            values |= {"io_ms": 1e3 * io_s, "over_io": statistics.median(case.update_s) / max(io_s, update_s)}
        table.row(values, num_wrong=int(not abs(case.loss - of["no offload"].loss) <= limit))
    return table.finish()


def main() -> int:
    """Run the benchmark; return 1 if a loss is wrong."""
    arguments = parse_arguments()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group(), tempfile.TemporaryDirectory(dir=arguments.folder) as own:
        torch.set_num_threads(arguments.threads)
        topology = Topology.from_env()
        folder = Path(arguments.folder or own)
        cases = build_cases(arguments, topology, folder)
        files = None
        if not arguments.no_files:
            nbytes = 12 * sum(bucket.layout.shard_numel for bucket in cases[0].optimizer.parts.runtime.buckets)
            files = PlainFiles(folder, topology, nbytes)
        for index in range(arguments.rounds + 1):
            for case in cases:
                case.round(arguments, topology)
                if not index:  # warm-up round
                    case.compute_s.clear()
                    case.update_s.clear()
            if files is not None:
                zcomm.all_reduce(torch.zeros(1), group=topology)
                files.move()
        status = report(arguments, cases, files, dist.get_world_size()) if topology.rank == 0 else 0
        for case in cases:
            case.optimizer.close()
        if files is not None:
            files.store.close()
        topology.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
