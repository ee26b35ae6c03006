"""Time forward and backward with parameters on NVMe, compared with computation and I/O, which should overlap.

    python bench/param_offload.py FOLDER [--tokens 64,256,512] [--layers 16] [--width 1536] [--rounds 9] [--json]

Each round times three cases: ``compute`` is forward and backward at stage 3 without offload; ``I/O`` is only the reads
of the offloaded case, with several in flight; ``both`` is forward and backward with every shard in files. ``/max`` is
``both`` over the larger of the other two, the median over the rounds; 1 is a perfect overlap. More tokens are more
computation for the same bytes. A time is that of the slowest rank. ``#wrong`` counts gradients that differ from those
without offload, and adds one if ``I/O`` reads another number of bytes. The files need twice the size of the model:
layers x width^2 x 2 bytes for each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zcomm import Topology
from zcomm._bench.harness import BenchReport, Column, Timing, interleave
from zcomm._bench.launch import process_group, relaunch_under_torchrun
from zero import ZeroOptimizer
from zero._storage.file_store import FileStore, Transfer
from zero._storage.tier_settings import FileSettings
from zero._storage.transfer_counters import moved
from zero.utils import safe_get_full_grad

COLUMNS = [
    Column("tokens", "tokens"),
    Column("mib", "read(MiB)", ".0f"),
    Column("compute_ms", "compute(ms)", ".1f", is_measurement=True),
    Column("io_ms", "I/O(ms)", ".1f", is_measurement=True),
    Column("both_ms", "both(ms)", ".1f", is_measurement=True),
    Column("over_max", "/max", ".3f", is_measurement=True),
]
READS_IN_FLIGHT = 4
MIB = 1024**2


class Deep(nn.Module):
    """A stack of equal linear layers."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map [tokens, width] to the same shape."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Training:
    """Forward and backward of one model, its shards on the device or in files."""

    def __init__(self, options: argparse.Namespace, topology: Topology, folder: Path | None) -> None:
        torch.manual_seed(0)
        self.model = Deep(options.width, options.layers).bfloat16()
        self.has_gradients = False
        offload = {} if folder is None else {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0}
        self.optimizer = ZeroOptimizer(
            self.model, torch.optim.SGD, topology=topology, stage=3, lr=0.0, offload_param=offload
        )

    def warm_up(self, x: Tensor) -> None:
        """Run two steps; the first records the order of the layers."""
        self.end_step()
        for _ in range(2):
            self.forward_backward(x)
            self.end_step()

    def end_step(self) -> None:
        """Run the optimizer step, untimed, if there was a backward; it starts reading for the next forward."""
        if self.has_gradients:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.has_gradients = False

    def forward_backward(self, x: Tensor) -> None:
        """Run the timed part of a step."""
        self.model(x).float().square().sum().backward()
        self.has_gradients = True

    def gradients(self) -> list[Tensor]:
        """Return the full averaged gradients, layer by layer."""
        found = [safe_get_full_grad(layer.weight) for layer in self.model.layers]
        return [grad for grad in found if grad is not None]


class Reads:
    """Only the reads, of files like those of the shards."""

    def __init__(self, folder: Path, topology: Topology, num_layers: int, layer_nbytes: int) -> None:
        self.store = FileStore(folder, files=FileSettings(), name="bench", topology=topology)
        self.nbytes = layer_nbytes
        self.files = [self.store.create(f"layer{i}", layer_nbytes) for i in range(num_layers)]
        buffer = self.store.buffer(layer_nbytes).random_()
        for file in self.files:
            self.store.write(file, 0, buffer).wait()
        self.store.give(buffer)
        self.calls = 0
        """Number of reads of a run."""

    def run(self) -> None:
        """Read in forward order, then in backward order."""
        order = [*range(len(self.files)), *reversed(range(len(self.files)))]
        in_flight: deque[tuple[Transfer, Tensor]] = deque()
        for index in order[: self.calls]:
            if len(in_flight) == READS_IN_FLIGHT:
                self._end(*in_flight.popleft())
            buffer = self.store.buffer(self.nbytes)
            in_flight.append((self.store.read(self.files[index], 0, buffer), buffer))
        while in_flight:
            self._end(*in_flight.popleft())

    def _end(self, transfer: Transfer, buffer: Tensor) -> None:
        transfer.wait()
        self.store.give(buffer)


def bench(options: argparse.Namespace, topology: Topology, report: BenchReport) -> None:
    """Measure all numbers of tokens and print their rows."""
    plain, offloaded = (Training(options, topology, folder) for folder in (None, options.folder))
    layer_nbytes = options.width**2 * 2 // topology.world_size
    reads = Reads(options.folder, topology, options.layers, layer_nbytes)
    try:
        for tokens in map(int, options.tokens.split(",")):
            torch.manual_seed(topology.rank)
            x = torch.randn(tokens, options.width, dtype=torch.bfloat16)
            for training in (plain, offloaded):
                training.warm_up(x)
            with moved() as window:
                offloaded.forward_backward(x)
            plain.forward_backward(x)
            pairs = zip(plain.gradients(), offloaded.gradients(), strict=True)
            num_wrong = sum(int((a != b).sum()) for a, b in pairs)
            nbytes, reads.calls = window.bytes(link="read"), window.calls(link="read")
            num_wrong += int(nbytes != reads.calls * layer_nbytes)
            row = {"tokens": tokens, "mib": nbytes / MIB, **_times(options, plain, offloaded, reads, x)}
            if topology.rank == 0:
                report.row(row, num_wrong=num_wrong)
    finally:
        reads.store.close()
        for training in (plain, offloaded):
            training.optimizer.close()


def _times(
    options: argparse.Namespace, plain: Training, offloaded: Training, reads: Reads, x: Tensor
) -> dict[str, float]:
    """Time the three cases; return the columns of a row."""

    def end_steps() -> None:
        for training in (plain, offloaded):
            training.end_step()
        dist.barrier()

    cases = {
        "compute": lambda: plain.forward_backward(x), "I/O": reads.run, "both": lambda: offloaded.forward_backward(x),
    }  # fmt: skip
    timings = interleave(cases, rounds=options.rounds, before_each=end_steps, after_each=dist.barrier)
    compute, io, both = (timings[name] for name in cases)
    ratios = [b / max(a, c) for a, c, b in zip(compute.seconds, io.seconds, both.seconds, strict=True)]
    return {
        "compute_ms": _ms(compute), "io_ms": _ms(io), "both_ms": _ms(both), "over_max": statistics.median(ratios),
    }  # fmt: skip


def _ms(timing: Timing) -> float:
    return 1e3 * timing.p50


def main() -> int:
    """Print all rows; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder on the disk to measure")
    parser.add_argument("--num-ranks", "--nproc", type=int, default=2, help="number of ranks, without torchrun")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of each rank (default 1: other cores are free for I/O)"
    )
    parser.add_argument("--tokens", default="64,256,512", help="tokens of a rank's batch, a list (default 64,256,512)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    options = parser.parse_args()
    relaunch_under_torchrun(options.num_ranks)
    with process_group():
        torch.set_num_threads(options.threads)
        topology = Topology.from_env()
        report = BenchReport(COLUMNS, as_json=options.json)
        if topology.rank == 0:
            report.start(
                "param_offload", ranks=topology.world_size, layers=options.layers, width=options.width,
                rounds=options.rounds, threads=options.threads,
            )  # fmt: skip
        bench(options, topology, report)
        status = report.finish() if topology.rank == 0 else 0
        topology.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
