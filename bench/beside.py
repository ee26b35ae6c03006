"""Compare two versions of this library: is a step slower than before, or does it send more?

    git worktree add ../before COMMIT      and an environment with that version installed: ../before/.venv
    python bench/beside.py --before ../before/.venv/bin/python
    python bench/beside.py --before ../before/.venv/bin/python --networks loopback 200mbit --num-ranks 4

Both versions run at the same time, each in separate ranks, and their steps are interleaved: a round is ``--steps``
optimizer steps of each system in each version, in random order, while all other ranks wait at a pipe. So other load on
the machine affects both alike. Both versions run the scripts of this folder; only the library differs. The scripts
import ``zcomm._bench``: for a version that still calls it ``zcomm.bench``, make a link,
``ln -s bench ../before/zcomm/_bench``.

Both versions keep freed memory in the process (glibc's thresholds, unless the environment sets them). By default glibc
returns some to the system and gets it back page by page. That takes up to a third of such a step, and which version it
hits depends on the addresses of its buffers.

A row gives the median over the rounds of the ratio now / before, and a confidence interval of at least 95 % (two order
statistics of the ratios, so it assumes nothing about their distribution). The row fails if the interval lies above
``--limit``, or, with ``--same-bits``, if the losses of the same steps differ in any bit. The exit status is 1 if a row
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from beside_ranks import ANSWERS, END
from comparison.intervals import CONFIDENCE, interval
from comparison.tables import LOOPBACK
from contenders.catalogue import COMPARED
from contenders.job import SHAPE, add_shape

from zcomm._bench.harness import BenchReport, Column

SYSTEMS = ["zero stage 1", "zero stage 2", "zero stage 3", "zero++", "delta-hpz", "zero stage 3 offload"]
START_S = 300
"""Limit of one request; the first imports torch and builds the system."""
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""glibc's thresholds at which freed memory stays in the process."""
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
    add("--before", required=True, help="the Python interpreter of the other version's environment")
    add("--networks", nargs="+", default=[LOOPBACK], help="rates in the notation of tc (needs root), or loopback")
    add("--systems", nargs="+", choices=COMPARED, default=SYSTEMS, metavar="SYSTEM", help="as those of compare.py")
    add("--num-ranks", type=int, default=2)
    add("--ranks-per-node", type=int, default=2)
    add("--rounds", type=int, default=15)
    add("--steps", type=int, default=4, help="steps of each system in a round")
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
        # open both ways: open() does not wait for a rank, and the pipe survives when a rank closes it
        self._requests = [os.open(folder / str(rank), os.O_RDWR) for rank in range(arguments.num_ranks)]
        self._answers = os.fdopen(os.open(folder / ANSWERS, os.O_RDWR), encoding="utf-8")

    def run(self, system: str) -> dict[str, Any]:
        """Run the steps of ``system``; return rank 0's measurements."""
        self._request(system)
        for _ in range(START_S):
            if select.select([self._answers], [], [], 1.0)[0]:
                answer: dict[str, Any] = json.loads(self._answers.readline())
                return answer
            if self._process.poll() is not None:
                break
        raise SystemExit(f"beside.py: the ranks did not run {system!r} (exit code {self._process.poll()})")

    def _request(self, word: str) -> None:
        for pipe in self._requests:
            os.write(pipe, f"{word}\n".encode())

    def close(self) -> None:
        """End the ranks."""
        self._request(END)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


@contextmanager
def both(arguments: argparse.Namespace, network: str) -> Iterator[dict[str, Job]]:
    """Start the ranks of both versions; end them afterwards."""
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
    """Measure every system in every version; the first entry of each, in which it is built, does not count."""
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with both(arguments, network) as jobs:
        for number in range(arguments.rounds + 1):
            draw = random.Random(number)
            for system in draw.sample(arguments.systems, len(arguments.systems)):
                for version in draw.sample(sorted(jobs), 2):
                    measured.setdefault((system, version), []).append(jobs[version].run(system))
    return measured


def row_of(network: str, system: str, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row of a system."""
    ratios = [new["seconds"] / old["seconds"] for old, new in zip(before[1:], now[1:], strict=True)]
    low, high = interval(ratios)
    more = [new["wire_nbytes"] - old["wire_nbytes"] for old, new in zip(before[1:], now[1:], strict=True)]
    return {
        "network": network,
        "system": system,
        "before_ms": 1e3 * statistics.median(old["seconds"] for old in before[1:]),
        "now_ms": 1e3 * statistics.median(new["seconds"] for new in now[1:]),
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
    table.note(
        f"{arguments.rounds} rounds of {arguments.steps} steps; interval of {CONFIDENCE:.0%}; sent: bytes of a node"
    )
    for network in arguments.networks:
        measured = measure(arguments, network)
        for system in arguments.systems:
            row = row_of(network, system, measured[system, "before"], measured[system, "now"])
            is_slower, differs = row["low"] > arguments.limit, arguments.same_bits and not row["same_loss"]
            table.row({**row, "same_loss": "yes" if row["same_loss"] else "no"}, num_wrong=int(is_slower or differs))
    return table.finish()


if __name__ == "__main__":
    sys.exit(main())
