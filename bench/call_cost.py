"""CPU time that a small collective takes in its caller, beside torch's own, interleaved.

    python bench/call_cost.py [--num-ranks 2] [--nbytes 4096] [--rounds 300] [--json]

At 4 KiB the network costs little, and the calls of Python and of gloo are what a training step pays for each exchange.
``cpu(us)`` is the median of the calling thread's CPU time (time.thread_time), so waiting does not count, and neither do
gloo's own threads. ``/torch`` compares it with the sum of the medians of the torch calls in ``like``. The bench passes
no judgement: ``#wrong`` is 0.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import zcomm
from zcomm._bench import torch_calls
from zcomm._bench.harness import BenchReport, Column
from zcomm._bench.launch import process_group, relaunch_under_torchrun

COLUMNS = [
    Column("call", "call".ljust(26)),
    Column("like", "like".ljust(32)),
    Column("cpu_us", "cpu(us)", ".1f", is_measurement=True),
    Column("torch_us", "torch(us)", ".1f", is_measurement=True),
    Column("ratio", "/torch", ".2f", is_measurement=True),
]
WARMUP = 30


def cases(nbytes: int, device: torch.device) -> tuple[dict[str, Callable[[], object]], dict[str, tuple[str, ...]]]:
    """Return all calls by name, and for each call of zcomm the calls of torch that do the same."""
    ranks, numel = dist.get_world_size(), nbytes // 4
    shard, full = torch.randn(numel, device=device), torch.empty(ranks * numel, device=device)
    summed, part = torch.randn(numel, device=device), torch.empty(numel // ranks, device=device)
    received = torch.empty_like(full)
    calls: dict[str, Callable[[], object]] = {
        "torch all_gather": lambda: torch_calls.all_gather(full, shard),
        "torch reduce_scatter / n": lambda: torch_calls.reduce_scatter(part, summed, 1),
        "torch all_gather / n": lambda: torch_calls.all_gather(summed, part),
        "torch all_to_all": lambda: torch_calls.all_to_all(received, full),
    }
    like: dict[str, tuple[str, ...]] = {}
    for wire in ("none", "int8"):
        options = {"format": wire}
        calls[f"all_gather_single {wire}"] = lambda o=options: zcomm.all_gather_single(full, shard, **o)  # type: ignore[misc]
        calls[f"all_to_all_single {wire}"] = lambda o=options: zcomm.all_to_all_single(received, full, **o)  # type: ignore[misc]
        calls[f"all_reduce {wire}"] = lambda o=options: zcomm.all_reduce(summed, **o)  # type: ignore[misc]
        like[f"all_gather_single {wire}"] = ("torch all_gather",)
        like[f"all_to_all_single {wire}"] = ("torch all_to_all",)
        like[f"all_reduce {wire}"] = ("torch reduce_scatter / n", "torch all_gather / n")
    return calls, like


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median CPU time of each call in this thread, in us; every rank calls in the same random order."""
    times: dict[str, list[int]] = {name: [] for name in calls}
    order, draw = list(calls), random.Random(0)
    for number in range(WARMUP + rounds):
        draw.shuffle(order)
        for name in order:
            dist.barrier()
            started = time.thread_time_ns()
            calls[name]()
            if number >= WARMUP:
                times[name].append(time.thread_time_ns() - started)
    return {name: statistics.median(found) / 1e3 for name, found in times.items()}


def main() -> int:
    """Measure, and print a row for each call of zcomm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--nbytes", type=int, default=4096, help="of a rank's shard, float32")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="the same rows as JSON lines")
    arguments = parser.parse_args()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group("cpu") as device:
        calls, like = cases(arguments.nbytes, device)
        found = measure(calls, arguments.rounds)
        if dist.get_rank() != 0:
            return 0
        table = BenchReport(COLUMNS, as_json=arguments.json)
        table.start("call_cost", num_ranks=arguments.num_ranks, nbytes=arguments.nbytes, rounds=arguments.rounds)
        for call, of_torch in like.items():
            peer = sum(found[name] for name in of_torch)
            row = {"call": call, "like": " + ".join(of_torch), "cpu_us": found[call], "torch_us": peer}
            table.row(row | {"ratio": found[call] / peer}, num_wrong=0)
        return table.finish()


if __name__ == "__main__":
    sys.exit(main())
