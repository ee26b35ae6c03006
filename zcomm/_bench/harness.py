"""What every benchmark shares: interleaved timing, and rows in the grammar of nccl-tests.

    # zcomm bench 0.1.0  torch 2.13.0  ...          context, one line a fact
    #   op    size(B)    p50(us)    #wrong          units in the header
      decode     4096       12.3         0          one row a case, correctness in the row

While a case runs, a terminal's last line shows what is being done. A row that is wrong shows no times, and
:meth:`BenchReport.finish` then ends the process with status 1. With ``--json`` the same rows are JSON lines on standard
output.
"""

from __future__ import annotations

import json
import platform
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

CLEAR_LINE = "\x1b[K"


@dataclass(frozen=True)
class Timing:
    """Times of one case, in seconds, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def p50(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The 99th percentile; of fewer than 100 times the largest."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(0.99 * len(self.seconds)))]

    def faster_than(self, other: Timing) -> float:
        """How many times: the median over the rounds, in each of which both were timed."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=True))


Key = TypeVar("Key")


def interleave(
    cases: Mapping[Key, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    beginning: Callable[[], object] | None = None,
    ending: Callable[[], object] | None = None,
) -> dict[Key, Timing]:
    """Time each case once a round, so that a slow moment of the machine falls on all of them.

    Each round has an order of its own, for a call is as fast as the one before leaves caches and threads; the orders
    are the same in every process. ``beginning`` runs before each case, not timed (a barrier), ``ending`` after it,
    timed (a device's synchronize).
    """
    seconds: dict[Key, list[float]] = {name: [] for name in cases}
    order, random = list(cases.items()), Random(0)
    for _ in range(warmup + rounds):
        random.shuffle(order)
        for name, call in order:
            if beginning is not None:
                beginning()
            start = time.perf_counter()
            call()
            if ending is not None:
                ending()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times[warmup:])) for name, times in seconds.items()}


@dataclass(frozen=True)
class Column:
    """One column: the row's key, the header with the unit, a format, and whether it is withheld from a wrong row."""

    key: str
    header: str
    spec: str = ""
    is_measurement: bool = False

    def width(self) -> int:
        """Characters of the column, separator not counted."""
        return max(len(self.header), 8)


class BenchReport:
    """Prints context, header and rows; remembers whether any row was wrong."""

    def __init__(self, columns: Sequence[Column], *, as_json: bool = False) -> None:
        """A report of ``columns`` with a last column ``#wrong``; no output yet."""
        self._columns = [*columns, Column("num_wrong", "#wrong")]
        self._as_json = as_json
        self._total_wrong = 0

    def start(self, name: str, **settings: object) -> None:
        """Print what ran, with what, and where; then the header."""
        self.note(f"zcomm bench {version('zcomm-zero')}  {name}  torch {torch.__version__}  " + _pairs(settings))
        self.note(_machine())
        if not self._as_json:
            _write("#" + " ".join(column.header.rjust(column.width()) for column in self._columns))

    def note(self, text: str) -> None:
        """Print a line of context."""
        _write(json.dumps({"context": text}) if self._as_json else f"# {text}")

    def status(self, text: str) -> None:
        """Show ``text`` in the last line of a terminal until something else is printed; elsewhere nothing."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{CLEAR_LINE}{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def row(self, values: Mapping[str, Any], *, num_wrong: int) -> None:
        """Print one case; of a wrong one no measurements. What ``values`` lack is shown as ``-``."""
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
        """Print the verdict; the process's exit status."""
        self.note(f"wrong results : {self._total_wrong} {'FAILED' if self._total_wrong else 'OK'}")
        return 1 if self._total_wrong else 0


def _write(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{CLEAR_LINE}")  # the status
        sys.stderr.flush()
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _pairs(settings: Mapping[str, object]) -> str:
    return "  ".join(f"{name} {value}" for name, value in settings.items())


def _machine() -> str:
    gpus = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
    cpu = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return f"cpu: {cpu}   gpu: {', '.join(gpus) or 'none'}   commit {_commit()}   {now}"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    """Of the work tree that this file is tracked in; an installed copy may lie in that of something else."""
    here = Path(__file__)
    return _git(here, "rev-parse", "--short", "HEAD") if _git(here, "ls-files", here.name) else "unknown"


def _git(file: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
