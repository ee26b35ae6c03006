"""Compare a training step of every stage and mode with DDP, FSDP2 and DeepSpeed, on ranks that share a GPU.

    python bench/gpu_ranks.py 1 bench/gpu_training.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    python bench/gpu_ranks.py 4 bench/gpu_training.py --ranks-per-node 2
    python bench/gpu_ranks.py 2 bench/gpu_training.py --device cpu --ranks-per-node 1 --num-layers 1 --hidden-size 32

The contenders run one after another, so that each row is printed early and no contender has the memory of another.
``first`` is construction and the first step, ``p50`` the median of the later steps, ``host`` the time until a step
returns, ``kernels`` and ``copies`` what the first rank's GPU ran for one step, ``/ddp`` the speed-up over DDP.
``#wrong``: the loss after the same steps differs from DDP's by more than LOSS_TOLERANCE. See gpu_sharing.py
on ranks that share a GPU. With one rank nothing is sent: the figures show each library's overhead.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

import torch
from contenders.catalogue import ENTRIES, available, build
from contenders.contender import Contender
from contenders.job import add_shape, batch, new_setup
from gpu_budget import is_spent
from gpu_sharing import join_ranks, on_first_rank, start_report
from gpu_trace import count_launches, traced

import zcomm
from zcomm import Topology, control
from zcomm._bench import torch_calls
from zcomm._bench.harness import BenchReport, Column

PEERS = ("ddp", "fsdp2 reshard=False", "fsdp2 reshard=True", *(f"deepspeed stage {n}" for n in (1, 2, 3)))
OURS = (*(f"zero stage {n}" for n in (1, 2, 3)), "zero++", "delta-hpz", "delta-hpz exact")
ORDER = ("ddp", *OURS, *PEERS[1:])
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative; after tens of steps, not after one."""
COLUMNS = [
    Column("ranks", "ranks"),
    Column("case", "case".rjust(20)),
    Column("p50_ms", "p50(ms)", ".2f", is_measurement=True),
    Column("host_ms", "host(ms)", ".2f", is_measurement=True),
    Column("over_ddp", "/ddp", ".2f", is_measurement=True),
    Column("tokens_per_s", "tokens/s", ".0f", is_measurement=True),
    Column("kernels", "kernels", "d"),
    Column("copies", "copies", "d"),
    Column("first_s", "first(s)", ".2f", is_measurement=True),
    Column("peak_mib", "peak(MiB)", ".0f", is_measurement=True),
    Column("loss", "loss", ".4f"),
    Column("unavailable", "unavailable"),
    Column("error", "error"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks-per-node", type=int, help="ranks that stand in for a node; default: all")
    parser.add_argument("--dtype", choices=LOSS_TOLERANCE, default="bfloat16")
    parser.add_argument("--contenders", nargs="+", choices=ORDER, default=ORDER, metavar="NAME")
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after one warm-up step")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    add_shape(parser)
    return parser.parse_args()


class Training:
    """The contenders on the ranks of ``topology``."""

    def __init__(self, arguments: argparse.Namespace, topology: Topology, device: torch.device) -> None:
        self._arguments, self._topology, self._device = arguments, topology, device
        self._of_ddp: dict[str, float] = {}

    def row(self, name: str) -> tuple[dict[str, Any], int]:
        """Return the row of one contender. If it fails on any rank: the error of ours, or why a peer is unavailable."""
        found: dict[str, Any] = {}
        message = ""
        try:
            found = self._measure(name)
        except Exception as error:  # the other contenders continue
            message = f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:200]}"
        self._free()
        errors = [text for text in control.gather_texts(message, self._topology) if text]
        row = {"ranks": f"{self._topology.num_nodes}x{self._topology.ranks_per_node}", "case": name}
        if errors:
            return row | {"unavailable" if name in PEERS else "error": errors[0]}, int(name not in PEERS)
        return self._compared(row | found)

    def _compared(self, row: dict[str, Any]) -> tuple[dict[str, Any], int]:
        if row["case"] == "ddp":
            self._of_ddp = row
        if not self._of_ddp:
            return row, 0
        right, tolerance = self._of_ddp["loss"], LOSS_TOLERANCE[self._arguments.dtype]
        is_right = abs(row["loss"] - right) <= tolerance * abs(right)  # NaN is not
        return row | {"over_ddp": self._of_ddp["p50_ms"] / row["p50_ms"]}, int(not is_right)

    def _measure(self, name: str) -> dict[str, Any]:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        setup = new_setup(self._arguments, self._arguments.dtype, self._device, self._topology)
        contender = build(name, setup)
        try:
            self._step(contender)
            first, times = time.perf_counter() - start, [self._step(contender) for _ in range(self._arguments.steps)]
            launches = count_launches(traced(lambda: self._step(contender), self._device))
        finally:
            contender.close()
        step_s = statistics.median(seconds for seconds, _ in times)
        tokens = self._topology.world_size * self._arguments.batch_size * self._arguments.seq_length
        peak = {"peak_mib": torch.cuda.max_memory_allocated() / 2**20} if self._device.type == "cuda" else {}
        return {
            "p50_ms": 1e3 * step_s, "host_ms": 1e3 * statistics.median(host for _, host in times),
            "tokens_per_s": tokens / step_s, "first_s": first, "loss": contender.loss, **peak,
            **(launches._asdict() if launches else {}),
        }  # fmt: skip

    def _step(self, contender: Contender) -> tuple[float, float]:
        """Return the seconds until a step ends on all ranks, and until its call returns on this rank."""
        tokens = batch(self._arguments, contender.num_steps, self._topology.rank, self._device)
        torch_calls.barrier()
        start = time.perf_counter()
        loss = contender.step(*tokens)
        host = time.perf_counter() - start
        torch_calls.barrier()
        total = time.perf_counter() - start
        contender.num_steps += 1
        mean = loss.float().reshape(1)
        zcomm.all_reduce(mean, "avg", group=self._topology)
        contender.loss = mean.item()
        return total, host

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def run(arguments: argparse.Namespace, topology: Topology, device: torch.device, report: BenchReport | None) -> int:
    """Run all installed contenders; return 1 if one of ours fails or its loss is not DDP's."""
    training, skipped = Training(arguments, topology, device), []
    for name in arguments.contenders:
        if not available((name,)):
            row, num_wrong = {"case": name, "unavailable": f"{ENTRIES[name].needs} is not installed"}, 0
        elif on_first_rank(is_spent(), topology):
            skipped.append(name)
            continue
        else:
            row, num_wrong = training.row(name)
        if report is not None:
            report.row(row, num_wrong=num_wrong)
    if report is None:
        return 0
    if skipped:
        report.note(f"not measured, for lack of time: {', '.join(skipped)}")
    return report.finish()


def main() -> int:
    """Join the ranks and train."""
    arguments = parse_arguments()
    with join_ranks(arguments.device, arguments.ranks_per_node) as (topology, device):
        report = start_report("gpu_training", COLUMNS, topology, device, as_json=arguments.json, dtype=arguments.dtype)
        if report is not None:
            numel = sum(
                p.numel() for p in new_setup(arguments, arguments.dtype, torch.device("meta")).model.parameters()
            )
            report.note(f"parameters {numel:,}  batch {arguments.batch_size} x {arguments.seq_length} per rank")
        return run(arguments, topology, device, report)


if __name__ == "__main__":
    sys.exit(main())
