"""Run the steps of a check, each a command with a time budget: a step that fails, hangs or dies ends no other step.

A step ends at the latest when its budget and those of all steps before it are spent. So later steps get the time that
earlier ones did not use, and all steps together end within the sum of the budgets. No step gets more than
``MOST_BUDGETS`` times its budget, so that a step that hangs leaves time for others. This module needs only Python's
standard library.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gpu_budget import LIMIT
from gpu_check_processes import MARK, die_with_parent, new_mark, stop
from gpu_check_record import FAIL, LATE, PASS, SKIP, Outcome, Record

__all__ = ["Place", "Step", "all_passed", "last_line", "run_steps"]

GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL; part of the step's time."""
MOST_BUDGETS = 2.0
LEAST_S = 1.0
"""A step that has less time than this is not started."""
POLL_S = 0.05


class Place(NamedTuple):
    """The folder and the environment that steps run in."""

    folder: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Step:
    """One command of the check."""

    name: str
    command: Sequence[str] = ()
    budget_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to that of this process."""
    skip_reason: str = ""
    """If not empty, the step is not started."""
    gives_figures: bool = False
    """Whether the step fails without a figure, unless it says why each is unavailable."""
    read: Callable[[str], tuple[str, str]] = lambda _: (PASS, "")
    """Parse the output to verdict and note. The verdict counts only if the exit code is 0."""


def run_steps(
    steps: Sequence[Step],
    record: Record,
    *,
    started_at: float,
    spent_s: float = 0.0,
    place: Callable[[], Place] = lambda: Place(Path.cwd(), {}),
    report: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Run ``steps`` one after another. ``started_at`` (time.monotonic()) is when a budget of ``spent_s`` started.

    ``place`` is called before each step, ``report`` after it.
    """
    end, outcomes = started_at + spent_s, []
    for step in steps:
        record.start_step(step.name)
        end += step.budget_s
        if step.skip_reason:
            outcome = Outcome(step.name, SKIP, 0.0, step.skip_reason)
        elif end - time.monotonic() < min(step.budget_s, LEAST_S):
            outcome = Outcome(step.name, LATE, 0.0, "not started: no time was left")
        else:
            where = place()
            most_s = MOST_BUDGETS * step.budget_s if step.gives_figures else float("inf")
            outcome = _run(step, record, where, min(end, time.monotonic() + most_s))
        outcomes.append(outcome)
        record.end_step(outcome)
        report(outcome)
    return outcomes


def all_passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether no step failed or was late; skipped steps do not count."""
    return all(outcome.verdict in (PASS, SKIP) for outcome in outcomes)


def _run(step: Step, record: Record, place: Place, end: float) -> Outcome:
    start, mark = time.monotonic(), os.environ.get(MARK) or new_mark()
    limit_s = end - start
    environment = {**os.environ, **step.environment, **place.environment, MARK: mark, LIMIT: f"{limit_s:.1f}"}
    try:
        process = subprocess.Popen(
            list(step.command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=place.folder, env=environment, start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has one thread)
        )  # fmt: skip
    except OSError as error:
        return Outcome(step.name, FAIL, 0.0, f"cannot be started: {error}")
    output = _Output(process, record)
    try:
        while process.poll() is None and time.monotonic() < end - GRACE_S:
            output.read(POLL_S)
        is_late = process.poll() is None
    finally:
        stop(process, mark, GRACE_S)
    output.finish()
    seconds, (verdict, note) = time.monotonic() - start, step.read(output.text)
    count, reasons = record.figures(step.name)
    if is_late:
        verdict, note = LATE, f"stopped after {limit_s:.0f} s; {note or last_line(output.text)}"
    elif process.returncode:
        verdict, note = FAIL, f"exit code {process.returncode}; {note or last_line(output.text)}"
    elif step.gives_figures and not count:
        verdict, note = (SKIP, "; ".join(dict.fromkeys(reasons))) if reasons else (FAIL, "no figure was printed")
    return Outcome(step.name, verdict, seconds, note, count)


class _Output:
    """The output of a process, recorded line by line as it arrives."""

    def __init__(self, process: subprocess.Popen[bytes], record: Record) -> None:
        assert process.stdout is not None, "the process was started with a pipe"
        self._pipe, self._record, self._partial_line = process.stdout, record, b""
        self._lines: list[str] = []
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def read(self, wait_s: float) -> bool:
        """Wait for output and record it; return False if there was none."""
        ready, _, _ = select.select([self._pipe], [], [], wait_s)
        chunk = os.read(self._pipe.fileno(), 1 << 16) if ready else b""
        if not chunk:
            time.sleep(wait_s if ready else 0.0)  # the process has closed its output but still runs
            return False
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            self._take(line)
        return True

    def finish(self) -> None:
        """Record the remaining output."""
        while self.read(0.0):
            pass
        if self._partial_line:
            self._take(self._partial_line)
        self._pipe.close()

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._lines.append(text)
        self._record.add_line(text)


def last_line(text: str) -> str:
    """Return the last line that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no output"
