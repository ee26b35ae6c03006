"""Two versions of this library side by side: is a step slower than it was, or does it send more?

    git worktree add ../before COMMIT      and an environment with that version installed: ../before/.venv
    python bench/beside.py --before ../before/.venv/bin/python
    python bench/beside.py --before ../before/.venv/bin/python --networks loopback 200mbit --num-ranks 4

Both versions run at once, each in ranks of its own, and take turns: a round is ``--steps`` optimizer steps of each
system in each version, in an order of its own, and whoever has no turn waits at a pipe. So whatever else the machine
does falls on both alike. The scripts are those beside this file for both; only the library differs. They import
``zcomm._bench``: a version that still calls it ``zcomm.bench`` needs a link, ``ln -s bench ../before/zcomm/_bench``.

For both, freed memory stays with the process (glibc's thresholds, unless the environment has them). By default glibc
returns some to the system and gets it back page by page, up to a third of such a step, and in which version depends on
where its buffers happen to lie.

A row gives the median over the rounds of the ratio now / before, and an interval that holds it with at least 95 %
probability (two order statistics of the ratios, so nothing is assumed of their distribution). It fails if the whole
interval lies above ``--limit``, or if the losses, which are of the same steps, are not the same to the last bit where
``--same-bits`` is given. The exit status is 1 if a row fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from beside_ranks import ANSWERS, END
from comparison.tables import LOOPBACK
from contenders.catalogue import COMPARED
from contenders.job import SHAPE, add_shape

from zcomm._bench.harness import BenchReport, Column

SYSTEMS = ["zero stage 1", "zero stage 2", "zero stage 3", "zero++", "delta-hpz", "zero stage 3 offload"]
CONFIDENCE = 0.95
START_S = 300
"""For the first turn, in which torch is imported and the system is built."""
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""Of glibc: memory that was freed is kept."""
COLUMNS = [
    Column("network", "network".rjust(10)),
    Column("system", "system".rjust(22)),
    Column("before_ms", "before(ms)", ".1f"),
    Column("now_ms", "now(ms)", ".1f"),
    Column("ratio", "now/before", ".3f"),
    Column("low", "from", ".3f"),
    Column("high", "to", ".3f"),
    Column("more_nbytes", "more sent(B)", "+,.0f"),
    Column("same_loss", "same loss"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--before", required=True, help="the Python whose environment has the other version")
    add("--networks", nargs="+", default=[LOOPBACK], help="rates as tc writes them (needs root), or loopback")
    add("--systems", nargs="+", choices=COMPARED, default=SYSTEMS)
    add("--num-ranks", type=int, default=2)
    add("--ranks-per-node", type=int, default=2)
    add("--rounds", type=int, default=15)
    add("--steps", type=int, default=4, help="of each system in a round")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    add("--limit", type=float, default=1.02)
    add("--same-bits", action="store_true", help="fail where the losses differ")
    add("--json", action="store_true", help="the same rows as JSON lines")
    add_shape(parser)
    return parser.parse_args()


class Job:
    """The ranks of one version."""

    def __init__(self, python: str, arguments: argparse.Namespace, network: str, folder: Path) -> None:
        folder.mkdir()
        for name in (ANSWERS, *map(str, range(arguments.num_ranks))):
            os.mkfifo(folder / name)
        options = {name: getattr(arguments, name) for name in (*SHAPE, "dtype", "steps")}
        options |= {"folder": folder, "ranks_per_node": arguments.ranks_per_node}
        if network == LOOPBACK:
            options |= {"num_ranks": arguments.num_ranks}
        else:
            options |= {"emulate_nodes": arguments.num_ranks // arguments.ranks_per_node, "rate": network}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        script = str(Path(__file__).with_name("beside_ranks.py"))
        self._process = subprocess.Popen([python, script, *words], env={"OMP_NUM_THREADS": "1"} | KEEPS | os.environ)
        # both ways: an open does not wait for the other side, and a pipe stays when a rank closes it
        self._asked = [os.open(folder / str(rank), os.O_RDWR) for rank in range(arguments.num_ranks)]
        self._answers = os.fdopen(os.open(folder / ANSWERS, os.O_RDWR), encoding="utf-8")

    def turn(self, system: str) -> dict[str, Any]:
        """What rank 0 says of the turn."""
        self._ask(system)
        for _ in range(START_S):
            if select.select([self._answers], [], [], 1.0)[0]:
                answer: dict[str, Any] = json.loads(self._answers.readline())
                return answer
            if self._process.poll() is not None:
                break
        raise SystemExit(f"beside.py: the ranks took no turn of {system!r} (exit code {self._process.poll()})")

    def _ask(self, word: str) -> None:
        for pipe in self._asked:
            os.write(pipe, f"{word}\n".encode())

    def close(self) -> None:
        """End the ranks."""
        self._ask(END)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


@contextmanager
def both(arguments: argparse.Namespace, network: str) -> Iterator[dict[str, Job]]:
    """The ranks of the version before and of this one."""
    jobs: dict[str, Job] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for version, python in (("before", arguments.before), ("now", sys.executable)):
                jobs[version] = Job(python, arguments, network, Path(folder, version))
            yield jobs
        finally:
            for job in jobs.values():
                job.close()


def measure(arguments: argparse.Namespace, network: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What every turn took, by system and version; the first of each, in which it is built, does not count."""
    turns: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with both(arguments, network) as jobs:
        for number in range(arguments.rounds + 1):
            draw = random.Random(number)
            for system in draw.sample(arguments.systems, len(arguments.systems)):
                for version in draw.sample(sorted(jobs), 2):
                    turns.setdefault((system, version), []).append(jobs[version].turn(system))
    return turns


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The two of ``values`` between which the median of what they were drawn from lies with this probability."""
    ordered, count = sorted(values), len(values)
    below, outside = 0, 0.0
    while below < count // 2:
        outside += 2 * math.comb(count, below) / 2**count  # so many of them, or fewer, lie on one side
        if outside > 1 - confidence:
            break
        below += 1
    first = max(below - 1, 0)
    return ordered[first], ordered[-1 - first]


def row_of(network: str, system: str, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row of a system."""
    ratios = [new["seconds"] / old["seconds"] for old, new in zip(before[1:], now[1:], strict=True)]
    low, high = interval(ratios)
    more = [new["wire_nbytes"] - old["wire_nbytes"] for old, new in zip(before[1:], now[1:], strict=True)]
    return {
        "network": network,
        "system": system,
        "before_ms": 1e3 * statistics.median(turn["seconds"] for turn in before[1:]),
        "now_ms": 1e3 * statistics.median(turn["seconds"] for turn in now[1:]),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "more_nbytes": statistics.median(more),
        "same_loss": all(old["loss"] == new["loss"] for old, new in zip(before, now, strict=True)),
    }


def main() -> int:
    """Measure; 1 if a row fails."""
    arguments = parse_arguments()
    table = BenchReport(COLUMNS, as_json=arguments.json)
    table.start("beside", num_ranks=arguments.num_ranks, dtype=arguments.dtype)
    table.note(f"{arguments.rounds} rounds of {arguments.steps} steps; interval of {CONFIDENCE:.0%}; sent: by a rank")
    for network in arguments.networks:
        turns = measure(arguments, network)
        for system in arguments.systems:
            row = row_of(network, system, turns[system, "before"], turns[system, "now"])
            is_slower, differs = row["low"] > arguments.limit, arguments.same_bits and not row["same_loss"]
            table.row({**row, "same_loss": "yes" if row["same_loss"] else "no"}, num_wrong=int(is_slower or differs))
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
