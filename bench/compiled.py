"""Tokens/s of blocks that torch.compile has compiled, beside eager ones, under ZeroOptimizer at each stage.

    python bench/compiled.py [--num-ranks 2] [--rounds 15] [--batch-size 4] [--seq-length 128] [--json]

A batch is large enough that computing takes most of a step. All cases are interleaved; figures are medians, ratios
those of the two times of a round, with the 95 % interval of their median. ``#wrong`` counts a loss that differs from
the eager one by more than ``LOSS_TOLERANCE`` after the same steps, and graph breaks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from comparison.intervals import interval
from contenders.job import add_shape, batch, new_setup

import zero
from zcomm import Topology
from zcomm._bench.harness import BenchReport, Column, interleave
from zcomm._bench.launch import process_group, relaunch_under_torchrun

LOSS_TOLERANCE = 1e-3
COLUMNS = [
    Column("stage", "stage".rjust(6)),
    Column("eager", "eager(tokens/s)", ",.0f", is_measurement=True),
    Column("compiled", "compiled(tokens/s)", ",.0f", is_measurement=True),
    Column("ratio", "compiled/eager", ".3f", is_measurement=True),
    Column("low", "from", ".3f", is_measurement=True),
    Column("high", "to", ".3f", is_measurement=True),
    Column("breaks", "graph breaks", "d"),
]


class Case:
    """A model that is trained on the same batches as the others."""

    def __init__(self, arguments: argparse.Namespace, topology: Topology, stage: int, *, is_compiled: bool) -> None:
        self.model = new_setup(arguments, "float32", torch.device("cpu")).model
        for block in self.model.blocks if is_compiled else ():
            block.compile(backend=arguments.backend)
        self.optimizer = zero.ZeroOptimizer(self.model, torch.optim.AdamW, topology=topology, stage=stage, lr=1e-3)
        self._batch = partial(batch, arguments, rank=topology.rank, device=torch.device("cpu"))
        self._num_steps, self.loss = 0, 0.0

    def step(self) -> None:
        """Take one step."""
        tokens, targets = self._batch(self._num_steps)
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._num_steps, self.loss = self._num_steps + 1, loss.item()


def measure(arguments: argparse.Namespace, topology: Topology) -> list[dict[str, Any]]:
    """Return a row for each stage."""
    cases = {
        (stage, is_compiled): Case(arguments, topology, stage, is_compiled=is_compiled)
        for stage in range(4)
        for is_compiled in (False, True)
    }
    calls: dict[tuple[int, bool], Callable[[], object]] = {key: case.step for key, case in cases.items()}
    times = interleave(calls, rounds=arguments.rounds, warmup=2, before_each=dist.barrier)
    tokens = topology.world_size * arguments.batch_size * arguments.seq_length
    rows = []
    for stage in range(4):
        eager, compiled = (times[stage, is_compiled] for is_compiled in (False, True))
        ratios = [slow / fast for slow, fast in zip(eager.seconds, compiled.seconds, strict=True)]
        low, high = interval(ratios)
        off = abs(cases[stage, True].loss - cases[stage, False].loss)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        wrong = int(off > LOSS_TOLERANCE * cases[stage, False].loss) + breaks
        figures = {"eager": tokens / eager.p50, "compiled": tokens / compiled.p50, "breaks": breaks}
        figures |= {"ratio": compiled.faster_than(eager), "low": low, "high": high}
        rows.append({"stage": stage, **figures, "wrong": wrong})
    for case in cases.values():
        case.optimizer.close()
    return rows


def main() -> int:
    """Measure, and print a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.set_defaults(num_layers=2, batch_size=4, seq_length=128)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--json", action="store_true", help="the same rows as JSON lines")
    arguments = parser.parse_args()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group("cpu"):
        topology = Topology(ranks_per_node=dist.get_world_size())
        rows = measure(arguments, topology)
        if topology.rank != 0:
            return 0
        table = BenchReport(COLUMNS, as_json=arguments.json)
        shape = {name: getattr(arguments, name) for name in ("num_ranks", "batch_size", "seq_length", "backend")}
        table.start("compiled", rounds=arguments.rounds, hidden_size=arguments.hidden_size, **shape)
        for row in rows:
            table.row(row, num_wrong=row.pop("wrong"))
        return table.finish()


if __name__ == "__main__":
    sys.exit(main())
