"""What a system's step takes with nobody to send to: as many worlds of one rank as there are ranks, all at once.

    python bench/plan_alone.py --dtype bfloat16 --systems alone "zero stage 3" --seconds 2       one world

plan_measured.py starts them. Whatever is shared, cores and memory's bandwidth, is shared as in the real run. What a
system does on its own account is in it: its hooks, its copies, its masters and their update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from contenders.catalogue import COMPARED, ENTRIES, build
from contenders.contender import Contender
from contenders.job import add_shape, batch, new_setup

from zcomm import Topology

__all__ = ["own_steps"]

NUM_TURNS = 5
"""Those that count."""


def own_steps(words: list[str], systems: list[str], num_ranks: int, seconds: float = 2.0) -> dict[str, float]:
    """Seconds of a step of each of the systems in such worlds, of the slowest rank; ``words`` are those of the job."""
    script = str(Path(__file__))
    command = [sys.executable, script, *words, f"--seconds={seconds}", "--systems", *systems]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment}
    worlds = [subprocess.Popen(command, text=True, **quiet) for _ in range(num_ranks)]
    try:
        said = [world.communicate()[0] for world in worlds]
    finally:
        for world in worlds:
            world.kill()
    if any(world.returncode for world in worlds):
        raise ValueError(f"a rank alone failed; run it by itself: {command}")
    of_ranks = [json.loads(text.splitlines()[-1]) for text in said]
    return {name: max(found[name] for found in of_ranks) for name in systems}


def main() -> None:
    """Let the systems take turns, and print the medians of their steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--systems", nargs="+", choices=COMPARED, required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each system")
    add_shape(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = _take_turns(arguments, Topology(ranks_per_node=1))
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def _take_turns(arguments: argparse.Namespace, topology: Topology) -> dict[str, float]:
    contenders = {name: _alone(name, arguments, topology) for name in arguments.systems}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(NUM_TURNS + 1):
        for name, contender in contenders.items():
            end = time.perf_counter() + arguments.seconds / NUM_TURNS
            while not taken[name] or time.perf_counter() < end:
                start = time.perf_counter()
                step = batch(arguments, contender.num_steps, 0, torch.device("cpu"), num_batches=contender.accumulation)
                contender.step(*step)
                contender.num_steps += 1
                taken[name].append(time.perf_counter() - start)
            if number == 0:
                taken[name].clear()
    for contender in contenders.values():
        contender.close()
    topology.close()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _alone(name: str, arguments: argparse.Namespace, topology: Topology) -> Contender:
    """What needs several ranks, compression and copies in each node, is left out."""
    setup, entry = new_setup(arguments, arguments.dtype, torch.device("cpu"), topology), ENTRIES[name]
    if entry.module == "zero_optimizer":
        options = {key: value for key, value in entry.options.items() if key in ("stage", "accumulation")}
        ENTRIES[name] = entry._replace(options=options)
    return build(name, setup)


if __name__ == "__main__":
    main()
