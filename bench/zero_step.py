"""Compare speed and peak memory of ZeroOptimizer's stages with FSDP2, DDP and, if installed, DeepSpeed.

    python bench/zero_step.py                                               2 ranks, float32
    python bench/zero_step.py --num-ranks 2 4 --dtype float32 bfloat16      a table of each
    python bench/zero_step.py --num-layers 19 --hidden-size 512 --num-attention-heads 8        60 M parameters

Speed: all contenders are interleaved in one process group: a round is ``--steps`` optimizer steps of each, so that
other load on the machine affects all alike. Figures and ratios are medians over the rounds. Stage 3 is compared with
FSDP2's ``reshard_after_forward=True`` and DeepSpeed's stage 3; stages 1 and 2 with ``False`` and the same stage of
DeepSpeed. Under torchrun only speed is measured.

Memory: each contender runs again in separate ranks (zero_memory.py), which import no other; ``--rounds 0``: memory
only.

All train in the same precision: optimizer states in float32, computation in ``--dtype`` (DDP: by autocast). ``#wrong``
counts a loss that differs from FSDP2's by more than ``LOSS_TOLERANCE`` after the same steps; such a row has no times,
and the exit code is 1. At its first use DeepSpeed compiles an operator, which takes minutes.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders.catalogue import ENTRIES, ONE_MACHINE, available, build
from contenders.contender import Contender
from contenders.job import SHAPE, add_shape, new_setup
from contenders.turn import take_steps

from zcomm import Topology
from zcomm._bench.harness import BenchReport, Column, Timing, interleave
from zcomm._bench.launch import process_group

LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # relative; after tens of steps, not after one
COLUMNS = [
    Column("case", "case".rjust(20)),
    Column("p50_ms", "p50(ms)", ".1f", is_measurement=True),
    Column("tokens_per_s", "tokens/s", ",.0f", is_measurement=True),
    Column("vs_fsdp2", "vs fsdp2", ".3f", is_measurement=True),
    Column("vs_deepspeed", "vs deepspeed", ".3f", is_measurement=True),
    Column("peak_mib", "peak(MiB)", ",.0f", is_measurement=True),
    Column("loss", "loss", ".5f"),
]
BASELINE = "fsdp2 reshard=True"
OPTIONS = ("rounds", "warmup_rounds", "steps")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--num-ranks", "--nproc", type=int, nargs="+", default=[2], help="number of ranks, without torchrun"
    )
    parser.add_argument("--dtype", choices=LOSS_TOLERANCE, nargs="+", default=["float32"])
    parser.add_argument(
        "--contenders", nargs="+", choices=ONE_MACHINE, help=f"beside {BASELINE!r}; default: all installed ones"
    )
    parser.add_argument("--rounds", type=int, default=9, help="0: memory only")
    parser.add_argument("--warmup-rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender in a round")
    parser.add_argument("--json", action="store_true", help="the same rows as JSON lines")
    add_shape(parser)
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[str]:
    """The contenders' names, in the table's order."""
    names = available()
    return [name for name in names if not arguments.contenders or name in (*arguments.contenders, BASELINE)]


def time_rounds(
    arguments: argparse.Namespace, contenders: dict[str, Contender], device: torch.device, topology: Topology
) -> dict[str, Timing]:
    """Time the contenders interleaved; each records its last loss, averaged over the ranks."""
    calls = {name: partial(take_steps, arguments, one, topology, device) for name, one in contenders.items()}
    return interleave(calls, rounds=arguments.rounds, warmup=arguments.warmup_rounds)


def speeds(
    arguments: argparse.Namespace, contenders: dict[str, Contender], timings: dict[str, Timing], world_size: int
) -> list[dict[str, Any]]:
    """Return the row of each contender, without its memory."""
    tokens, rows = world_size * arguments.batch_size * arguments.seq_length * arguments.steps, []
    for name, timing in timings.items():
        row = {
            "case": name,
            "p50_ms": 1e3 * timing.p50 / arguments.steps,
            "tokens_per_s": tokens / timing.p50,
            "loss": contenders[name].loss,
        }
        stage = ENTRIES[name].stage
        for column, peer in (("vs_fsdp2", f"fsdp2 reshard={stage == 3}"), ("vs_deepspeed", f"deepspeed stage {stage}")):
            if peer in timings:
                pairs = zip(timings[peer].seconds, timing.seconds, strict=True)
                row[column] = statistics.median(theirs / own for theirs, own in pairs)
        rows.append(row)
    return rows


def report(arguments: argparse.Namespace, dtype: str, world_size: int, rows: Sequence[dict[str, Any]]) -> int:
    """Print one row a contender; return the exit status."""
    table = BenchReport(COLUMNS, as_json=arguments.json)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    table.start("zero_step", backend=backend, world_size=world_size, dtype=dtype)
    numel = sum(p.numel() for p in new_setup(arguments, dtype, torch.device("cpu")).model.parameters())
    table.note(
        f"parameters {numel:,}  batch {arguments.batch_size} x {arguments.seq_length} per rank  "
        f"rounds {arguments.rounds} x {arguments.steps} steps, interleaved; memory: each in separate ranks"
    )
    right = next(row["loss"] for row in rows if row["case"] == BASELINE)
    for row in rows:
        is_close = abs(row["loss"] - right) <= LOSS_TOLERANCE[dtype] * abs(right)
        table.row(row, num_wrong=int(not is_close))
    return table.finish()


def run_rank(arguments: argparse.Namespace) -> int:
    """Measure only speed, on this rank of torchrun."""
    status = 0
    with process_group() as device:
        topology = Topology.from_env()
        for dtype in arguments.dtype:
            contenders = {name: build(name, new_setup(arguments, dtype, device)) for name in chosen(arguments)}
            timings = time_rounds(arguments, contenders, device, topology)
            if topology.rank == 0:
                rows = speeds(arguments, contenders, timings, topology.world_size)
                status |= report(arguments, dtype, topology.world_size, rows)
            for contender in contenders.values():
                contender.close()
        topology.close()
    return status


def start(num_ranks: int, script: str, *words: str) -> list[dict[str, Any]]:
    """Run a script of this folder on ``num_ranks`` ranks; return the JSON lines it printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [*torchrun, str(Path(__file__).with_name(script)), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not any("case" in row for row in rows):
        raise SystemExit(f"{' '.join(command)} printed no rows:\n{(done.stdout + done.stderr)[-4000:]}")
    return [row for row in rows if "case" in row]


def cache_bytecode() -> None:
    """Compile the library to bytecode, as installed peers are: compiling at import takes more memory."""
    for package in ("triton_kernels", "zcomm", "zero"):
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)


def run_tables(arguments: argparse.Namespace) -> int:
    """Start the ranks of every table, and print it."""
    cache_bytecode()
    names, status = chosen(arguments), 0
    job = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in SHAPE]
    timing = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in OPTIONS]
    for num_ranks in arguments.num_ranks:
        for dtype in arguments.dtype:
            words = [*job, "--dtype", dtype]
            rows: dict[str, dict[str, Any]] = {name: {} for name in names}
            for name in names:
                rows[name] |= start(num_ranks, "zero_memory.py", name, *words)[0]
            if arguments.rounds:
                for row in start(num_ranks, "zero_step.py", *words, *timing, "--json", "--contenders", *names):
                    rows[row["case"]] |= row
            status |= report(arguments, dtype, num_ranks, list(rows.values()))
    return status


def main() -> int:
    """Run the benchmark; return 1 if a loss is wrong."""
    arguments = parse_arguments()
    return run_rank(arguments) if "LOCAL_RANK" in os.environ else run_tables(arguments)


if __name__ == "__main__":
    sys.exit(main())
