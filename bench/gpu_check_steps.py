"""Steps of a check, each a command with a time limit of its own: a step that fails or is late does not end the others.

A step starts in a process group of its own, which is killed as a whole when the time is over. What it prints goes to a
file. Nothing here needs more than Python's standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FAIL", "LATE", "PASS", "SKIP", "Outcome", "Step", "all_passed", "last_line", "run_steps", "table"]

PASS, FAIL, SKIP, LATE = "pass", "FAIL", "skip", "LATE"
"""LATE: the step's time was over, or none was left for it to begin; it counts as failed."""
KILL_AFTER_S = 5.0
LEAST_S = 1.0
"""A step that has less time than this is not begun."""


@dataclass(frozen=True)
class Step:
    """One command of the check."""

    name: str
    command: Sequence[str] = ()
    budget_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of this process."""
    needs: Sequence[str] = ()
    """Steps that must have passed, if they are among those that are run."""
    skip_reason: str = ""
    """If not empty, the step is not begun."""
    is_check: bool = True
    """Otherwise it only measures: that no time was left for it is not a failure."""
    read: Callable[[str], tuple[str, str]] = lambda _: (PASS, "")
    """Verdict and note from what a command printed that ended with 0; the note also where it ended otherwise."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    verdict: str
    seconds: float
    note: str
    log: Path | None = None


def run_steps(
    steps: Sequence[Step], folder: Path, *, deadline_s: float, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run ``steps`` one after the other, at most ``deadline_s`` all together; what they print goes to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + deadline_s
    outcomes: dict[str, Outcome] = {}
    for number, step in enumerate(steps):
        missing = [name for name in step.needs if name in outcomes and outcomes[name].verdict != PASS]
        left_s = end - time.monotonic()
        if step.skip_reason:
            outcome = Outcome(step.name, SKIP, 0.0, step.skip_reason)
        elif missing:
            outcome = Outcome(step.name, SKIP, 0.0, f"needs: {', '.join(missing)}")
        elif left_s < min(step.budget_s, LEAST_S):
            note = "not begun: the time of the whole check was over"
            outcome = Outcome(step.name, LATE if step.is_check else SKIP, 0.0, note)
        else:
            outcome = _run(step, folder / f"{number:02}_{_file_name(step.name)}.log", min(step.budget_s, left_s))
        outcomes[step.name] = outcome
        report(outcome)
    return list(outcomes.values())


def all_passed(outcomes: Sequence[Outcome]) -> bool:
    """Whether no step failed or was late; skipped steps do not count."""
    return all(outcome.verdict in (PASS, SKIP) for outcome in outcomes)


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of ``outcomes``."""
    rows = [(o.name, o.verdict, f"{o.seconds:.1f}", o.note.replace("|", "/")) for o in outcomes]
    header = ("step", "result", "seconds", "note")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(3)]
    lines = [_line(header, widths), "|".join(["", *("-" * (w + 2) for w in widths), "---", ""])]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return f"| {' | '.join([*padded, cells[-1]])} |".replace("|  |", "| - |")


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)[:40].strip("_")


def _run(step: Step, log: Path, limit_s: float) -> Outcome:
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(step.command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **step.environment}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Outcome(step.name, FAIL, 0.0, f"cannot be started: {error}", log)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
    seconds, text = time.monotonic() - start, log.read_text(errors="replace")
    verdict, note = step.read(text)
    if code is None:
        return Outcome(step.name, LATE, seconds, f"stopped after {limit_s:.0f} s; {note or last_line(text)}", log)
    if code:
        return Outcome(step.name, FAIL, seconds, f"exit code {code}; {note or last_line(text)}", log)
    return Outcome(step.name, verdict, seconds, note, log)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process's group, which it leads; kindly at first if it runs itself."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_AFTER_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def last_line(text: str) -> str:
    """The last line that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it printed nothing"
