"""Simulate one rank of very large jobs: measure its memory, bytes sent and Python time, by the number of ranks.

    python bench/simulate.py                                     the table in bench/results/simulate.md
    python bench/simulate.py --ranks 16384 --layers 128 --hidden 25600 --setups "stage 3"

The code of zero and zcomm runs on torch's fake process group with tensors on ``meta`` (:mod:`fake_ranks`). Each row
runs in a separate process:

    states         GiB a rank of parameters, gradients, masters and moments, as counted by ``optimizer.memory()``
    buffers        GiB a rank of gathered parameters, gradients in flight, secondary partitions, residuals
    exchanges      collectives that a rank starts in a step; and the bytes that it sends in them, all links
    calls          calls of Python functions in a step; a loop over the ranks would show here
    kernels        launches of zcomm's kernels in a step: quantizing, decoding, summing
    construction   seconds to construct the optimizer
    step           seconds of the third step, after two that record the order of the layers
    process        growth of the process's peak memory, MiB
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import multiprocessing
import pstats
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fake_ranks import compute_nothing, fake_ranks, num_exchanges
from gpt_model import GPT, GPTConfig

import zcomm
from zero import ZeroOptimizer

SETUPS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "ZeRO++": {"stage": 3, "quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 8},
    "delta-hpZ": {"stage": 3, "mode": "delta_hpz"},
}
RANKS_PER_NODE, SEQUENCE = 8, 128
MODELS = {"13B": (40, 5120), "1T": (128, 25600)}
HEADER = (
    "| parameters | ranks | setup | states | buffers | exchanges | GB sent | calls | kernels | construction | step | "
    "process |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)


GROWTH = """
With more ranks, a rank has smaller states and fewer exchanges, kernels and Python calls, as a shard has fewer chunks.
Where uncompressed values are gathered in place, the second hop is an exchange for each node and chunk of at least 2^18
elements a shard: as many as the data has chunks, up to 6,000 here, and none once shards are smaller than a chunk
(stages 1 and 2 from 64 to 1,024 ranks, and at 16,384). Bytes sent grow with padding, as (1 - 1 / nodes), and with the
control exchanges. Construction grows with the world size: torch creates every process group on every rank, and the
ranks agree by 8 bytes from each.
"""


@dataclass(frozen=True)
class Row:
    """The measurements of one rank."""

    numel: int
    world_size: int
    setup: str
    states_nbytes: int
    buffers_nbytes: int
    num_exchanges: int
    sent_nbytes: int
    num_calls: int
    num_kernels: int
    construction_s: float
    step_s: float
    grown_mib: float

    def line(self) -> str:
        """Return the row of the table."""
        return (
            f"| {self.numel / 1e9:,.1f}e9 | {self.world_size:,} | {self.setup} | {self.states_nbytes / 2**30:.3f} | "
            f"{self.buffers_nbytes / 2**30:.2f} | {self.num_exchanges:,} | {self.sent_nbytes / 1e9:.2f} | "
            f"{self.num_calls:,} | {self.num_kernels:,} | "
            f"{self.construction_s:.1f} s | {self.step_s:.2f} s | {self.grown_mib:.0f} MiB |\n"
        )


def model_on_meta(layers: int, hidden: int) -> GPT:
    """Build a GPT in bf16 on ``meta``."""
    with torch.device("meta"):
        return GPT(GPTConfig(layers, hidden, max(hidden // 128, 1), SEQUENCE)).bfloat16()


def simulate(layers: int, hidden: int, setup: str, world_size: int) -> Row:
    """Construct and run three steps, time the third, and count the calls of a fourth."""
    logging.getLogger("zero").setLevel(logging.ERROR)
    before = _peak_mib()
    with fake_ranks(world_size, min(RANKS_PER_NODE, world_size)) as topology:
        model = model_on_meta(layers, hidden)
        numel = sum(param.numel() for param in model.parameters())
        start = time.perf_counter()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, topology=topology, lr=1e-4, **SETUPS[setup])
        construction_s = time.perf_counter() - start
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")

        def step() -> None:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        exchanges, start = num_exchanges(topology), time.perf_counter()
        with zcomm.traffic() as traffic:
            step()
        step_s, exchanges = time.perf_counter() - start, num_exchanges(topology) - exchanges
        memory = optimizer.memory()
        calls, kernels = _calls_of(step)
        optimizer.close()
    return Row(
        numel, world_size, setup, memory.model_states, memory.total - memory.model_states, exchanges, traffic.bytes(),
        calls, kernels, construction_s, step_s, _peak_mib() - before,
    )  # fmt: skip


def _calls_of(step: Callable[[], None]) -> tuple[int, int]:
    """Count the calls of all functions, and of kernels."""
    profile = cProfile.Profile()
    profile.runcall(step)
    found: Any = pstats.Stats(profile)
    kernels = [calls for (_, _, name), (calls, *_) in found.stats.items() if name == compute_nothing.__name__]
    return found.total_calls, sum(kernels)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _in_process(*arguments: Any) -> Row:
    """Run :func:`simulate` in a separate process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send(simulate(*arguments)))
    process.start()
    there.close()
    try:
        row: Row = here.recv()
    except EOFError:
        sys.exit("the simulated rank failed; its error is above")
    finally:
        process.join()
    return row


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16384])
    parser.add_argument("--setups", choices=SETUPS, nargs="+", default=list(SETUPS))
    parser.add_argument(
        "--layers",
        type=int,
        help="layers of one model, with --hidden; default: 13B on all numbers of ranks, 1T on the largest",
    )
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one row after another."""
    options = _parse(arguments)
    if options.layers:
        cases = [(options.layers, options.hidden, s, w) for s in options.setups for w in options.ranks]
    else:
        cases = [(*MODELS["13B"], s, w) for s in options.setups for w in options.ranks]
        cases += [(*MODELS["1T"], s, max(options.ranks)) for s in options.setups if s.startswith(("stage 3", "ZeRO++"))]
    print(HEADER, end="", flush=True)
    rows = []
    for case in cases:
        rows.append(_in_process(*case))
        print(rows[-1].line(), end="", flush=True)
    if options.output:
        options.output.write_text(_page(rows))


def _page(rows: Sequence[Row]) -> str:
    lines = "".join(row.line() for row in rows)
    return (
        f"# One rank of simulated jobs\n\n`python bench/simulate.py`, torch {torch.__version__}, {RANKS_PER_NODE} ranks"
        f" a node, sequences of {SEQUENCE}, bf16, default bucket caps; columns: see the script. GiB of states and "
        f"buffers.\n\n{HEADER}{lines}{GROWTH}"
    )


if __name__ == "__main__":
    main()
