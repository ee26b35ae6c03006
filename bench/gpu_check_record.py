"""Record the figures of a check on disk: each is written before the next one is measured.

    figures.jsonl   a line for each figure, appended: the step, seconds since the start, the row that the step printed
    figures.md      the same as tables, with the outcome of each step; replaced atomically, by a rename
    steps.log       the output of all steps

A step prints a figure as a line of JSON with ``num_wrong``, as BenchReport in zcomm._bench.harness does. With the key
``unavailable`` the line gives the reason why there is no figure. Lines with only ``context`` are shown below the step's
name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FAIL", "LATE", "LOG", "PASS", "ROWS", "SKIP", "TABLES", "Outcome", "Record", "row_of", "table"]

PASS, FAIL, SKIP, LATE = "pass", "FAIL", "skip", "LATE"
"""LATE: the step exceeded its time, or no time was left to start it; it counts as failed."""
ROWS, TABLES, LOG = "figures.jsonl", "figures.md", "steps.log"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    name: str
    verdict: str
    seconds: float
    note: str
    num_figures: int = 0


def row_of(line: str) -> dict[str, Any] | None:
    """Parse ``line`` as a JSON object; None if it is none."""
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


class Record:
    """The files of one check."""

    def __init__(self, folder: Path, title: str) -> None:
        """Create the files in ``folder``, replacing those of an earlier check."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.verdict = folder, "in progress, or killed"
        self._title, self._started, self.step = title, time.monotonic(), ""
        self._outcomes: list[Outcome] = []
        self._rows: dict[str, list[Row]] = {}
        self._contexts: dict[str, list[str]] = {}
        for name in (ROWS, TABLES, LOG):
            (folder / name).write_text("")

    def start_step(self, step: str) -> None:
        """Record what follows under ``step``."""
        self.step = step
        self._rows[step], self._contexts[step] = [], []
        self._write(LOG, f"\n== {step}, after {time.monotonic() - self._started:.1f} s")
        self._rewrite()

    def add_line(self, text: str) -> None:
        """Record a line that the step has printed."""
        self._write(LOG, text)
        row = row_of(text)
        if row is None:
            return
        if "num_wrong" in row:
            self.add_figure(row)
        elif "context" in row:
            self._contexts[self.step].append(str(row["context"]))

    def add_figure(self, row: Row, step: str = "") -> None:
        """Record one row of the current step, or of ``step``."""
        at = {"step": step or self.step, "at_s": round(time.monotonic() - self._started, 2)}
        self._write(ROWS, json.dumps({**at, **row}))
        self._rows[step or self.step].append(row)
        self._rewrite()

    def figures(self, step: str) -> tuple[int, list[str]]:
        """Return the number of figures of ``step``, and the reasons why others are unavailable."""
        rows = self._rows[step]
        return sum("unavailable" not in row for row in rows), [
            row["unavailable"] for row in rows if "unavailable" in row
        ]

    def end_step(self, outcome: Outcome) -> None:
        """Record the result of the current step."""
        self._outcomes.append(outcome)
        self._write(LOG, f"== {outcome.verdict}: {outcome.note}")
        self._rewrite()

    def finish(self, verdict: str) -> None:
        """Record the verdict of the check."""
        self.verdict = verdict
        self._rewrite()

    def _rewrite(self) -> None:
        parts = [f"# {self._title}", f"After {time.monotonic() - self._started:.0f} s: {self.verdict}."]
        parts.append(table(self._outcomes, running=self.step))
        for step, rows in self._rows.items():
            if rows or self._contexts[step]:
                parts += [f"## {step}", *self._contexts[step], *_tables(rows)]
        path = self.folder / TABLES
        new = path.with_suffix(".new")
        new.write_text("\n\n".join(parts) + "\n")
        new.replace(path)

    def _write(self, name: str, text: str) -> None:
        with (self.folder / name).open(
            "a"
        ) as file:  # closed each time: once in the page cache, data survives a SIGKILL
            file.write(text + "\n")


def table(outcomes: Sequence[Outcome], running: str = "") -> str:
    """Return a Markdown table of ``outcomes``, and of the step ``running`` unless it has ended."""
    rows = [(o.name, o.verdict, f"{o.seconds:.1f}", str(o.num_figures), o.note) for o in outcomes]
    if running and running not in {o.name for o in outcomes}:
        rows.append((running, "started", "-", "-", "-"))
    return _markdown([("step", "result", "seconds", "figures", "note"), *rows])


def _tables(rows: Sequence[Row]) -> list[str]:
    """Return a table of the rows with figures, and one of the rows without."""
    tables = []
    for some in ([r for r in rows if "unavailable" not in r], [r for r in rows if "unavailable" in r]):
        names = list(dict.fromkeys(name for row in some for name in row))
        if some:
            tables.append(_markdown([names, *([_cell(row.get(name, "-")) for name in names] for row in some)]))
    return tables


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "/").replace("\n", " ") or "-" for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]) - 1)] + [3]
    padded = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([padded[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *padded[1:]])
