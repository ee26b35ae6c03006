"""The benchmarks' harness: interleaved timing, and a report in the format of nccl-tests.

    # zcomm bench 0.1.0  torch 2.13.0  ...          context: versions, machine, settings
    #   op    size(B)    p50(us)    #wrong          header, with units
      decode     4096       12.3         0          one row for each case, with the number of wrong elements

On a terminal the last line shows the running case. A row with wrong elements shows no times, and then
:meth:`BenchReport.finish` returns exit status 1. With ``--json`` the rows are JSON lines on standard output.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch

from zcomm import control
from zcomm._bench import torch_calls
from zcomm._transport.topology import Topology

CLEAR_LINE = "\x1b[K"


@dataclass(frozen=True)
class Timing:
    """Times of one case, in seconds, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The 99th percentile; the largest if there are fewer than 100 times."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(0.99 * len(self.seconds)))]

    def faster_than(self, other: Timing) -> float:
        """The speedup over ``other``: the median of the ratios within each round."""
        return statistics.median(slow / fast for fast, slow in zip(self.seconds, other.seconds, strict=True))


Key = TypeVar("Key")


def interleave(
    cases: Mapping[Key, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    before_each: Callable[[], object] = lambda: None,
    after_each: Callable[[], object] = lambda: None,
) -> dict[Key, Timing]:
    """Time each case once in each round, so that a slow moment of the machine affects all cases alike.

    Each round has its own random order, because a call's time depends on the caches and threads that the call before
    has left. The seed is fixed: ranks with different orders would deadlock in different collectives. ``before_each``
    (a barrier) is not timed; ``after_each`` (a device's synchronize) is.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in cases}
    order, random = list(cases.items()), Random(0)
    for _ in range(warmup + rounds):
        random.shuffle(order)
        for name, call in order:
            before_each()
            start = time.perf_counter()
            call()
            after_each()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times[warmup:])) for name, times in seconds.items()}


def slowest_of_ranks(
    calls: Mapping[Key, Callable[[], Any]], topology: Topology, *, rounds: int, warmup: int, reset: Callable[[], None]
) -> dict[Key, Timing]:
    """Time ``calls`` interleaved: from a barrier to the end of the slowest rank. Every rank returns the same times.

    ``reset`` runs before each call, untimed.
    """

    def start() -> None:
        reset()
        torch_calls.barrier()  # or a call's time would include waiting for ranks that are still in the call before

    mine = interleave(calls, rounds=rounds, warmup=warmup, before_each=start, after_each=torch_calls.finish)
    slowest = {}
    for key, timing in mine.items():
        of_ranks = control.gather_float64(torch.tensor(timing.seconds, dtype=torch.float64), topology)
        slowest[key] = Timing(tuple(of_ranks.amax(0).tolist()))
    return slowest


@dataclass(frozen=True)
class Column:
    """One column: the row's key, the header with unit, a format spec, and whether a wrong row leaves it out."""

    key: str
    header: str
    spec: str = ""
    is_measurement: bool = False

    def width(self) -> int:
        """Width in characters, without the separator."""
        return max(len(self.header), 8)


class BenchReport:
    """Prints context, header and rows, and counts wrong elements."""

    def __init__(self, columns: Sequence[Column], *, as_json: bool = False) -> None:
        """Make a report of ``columns`` and a last column ``#wrong``. Prints nothing yet."""
        self._columns = [*columns, Column("num_wrong", "#wrong")]
        self._as_json = as_json
        self._total_wrong = 0

    def start(self, name: str, **settings: object) -> None:
        """Print versions, settings and the machine, then the header."""
        pairs = "  ".join(f"{setting} {value}" for setting, value in settings.items())
        self.note(f"zcomm bench {version('zcomm-zero')}  {name}  torch {torch.__version__}  {pairs}")
        self.note(_machine())
        if not self._as_json:
            _write("#" + " ".join(column.header.rjust(column.width()) for column in self._columns))

    def note(self, text: str) -> None:
        """Print a line of context."""
        _write(json.dumps({"context": text}) if self._as_json else f"# {text}")

    def status(self, text: str) -> None:
        """Show ``text`` in the last line of a terminal until the next output. Without a terminal do nothing."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{CLEAR_LINE}{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def row(self, values: Mapping[str, Any], *, num_wrong: int) -> None:
        """Print one case, without measurements if it is wrong. Columns missing from ``values`` show ``-``."""
        self._total_wrong += num_wrong
        shown = {
            column.key: values[column.key]
            for column in self._columns[:-1]
            if column.key in values and not (num_wrong and column.is_measurement)
        }
        shown["num_wrong"] = num_wrong
        if self._as_json:
            _write(json.dumps(shown))
            return
        cells = [
            (format(shown[column.key], column.spec) if column.key in shown else "-").rjust(column.width())
            for column in self._columns
        ]
        _write(" " + " ".join(cells))

    def finish(self) -> int:
        """Print the total of wrong elements and return the exit status of the process."""
        self.note(f"wrong results : {self._total_wrong} {'FAILED' if self._total_wrong else 'OK'}")
        return 1 if self._total_wrong else 0


def _write(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{CLEAR_LINE}")  # erase the status line
        sys.stderr.flush()
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _machine() -> str:
    gpus = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
    cpu = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return f"cpu: {cpu}   gpu: {', '.join(gpus) or 'none'}   commit {_commit()}   {now}"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return platform.machine() if found is None else found[1].strip()


def _commit() -> str:
    """The commit of this file's repository. An installed copy may lie in another project's work tree: "unknown"."""
    here = Path(__file__)
    return _git(here, "rev-parse", "--short", "HEAD") if _git(here, "ls-files", here.name) else "unknown"


def _git(file: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
