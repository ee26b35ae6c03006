"""Inject failures into gpu_check.py: it must keep its figures, end in time and report what failed.

    python bench/gpu_check_rehearsal.py KIND COMMAND...       run COMMAND until it has printed a figure, then fail

KIND is ``fail`` (exit code 1), ``hang`` (never end, and ignore SIGTERM) or ``kill`` (SIGKILL, as by the kernel when it
is out of memory; child processes go on). The failure follows the first figure, or the end if there is none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from gpu_check_plan import BUDGETS, COMMANDS, ENVIRONMENT, deadline_s
from gpu_check_processes import MARK, marked, new_mark
from gpu_check_record import ROWS, TABLES, row_of
from gpu_check_steps import Step

__all__ = ["KINDS", "Injection", "injected", "parse_injection", "rehearse_all"]

KINDS = ("fail", "hang", "kill")
CHECK_ITSELF = "gpu_check.py itself"
POLL_S = 0.02


class Injection(NamedTuple):
    """A failure to inject into a step."""

    kind: str
    step: str


def parse_injection(text: str, names: Sequence[str]) -> Injection:
    """Parse ``KIND:STEP``, where STEP is a name or an unambiguous prefix; raise ValueError if it is invalid."""
    kind, _, wanted = text.partition(":")
    found = [name for name in names if name == wanted] or [name for name in names if name.startswith(wanted)]
    if kind not in KINDS or len(found) != 1:
        raise ValueError(
            f"--rehearse takes KIND:STEP, KIND of {', '.join(KINDS)}, STEP of {', '.join(names)}: {text!r}"
        )
    return Injection(kind, found[0])


def injected(step: Step, kind: str) -> Step:
    """Return ``step`` with the failure injected into its command."""
    return replace(step, command=[sys.executable, str(Path(__file__).resolve()), kind, *step.command])


def go_wrong(kind: str, command: Sequence[str]) -> int:
    """Run ``command`` until its first figure, then fail as ``kind`` says."""
    process = subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "the process was started with a pipe"
    for line in process.stdout:
        print(line, end="", flush=True)
        row = row_of(line.rstrip()) or {}
        if "num_wrong" in row and "unavailable" not in row:
            break
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    process.kill()
    print("failed on purpose")
    return 1


@dataclass
class Run:
    """One rehearsal, with failures injected into some steps."""

    injections: Sequence[Injection]
    code: int
    seconds: float
    counts: Counter[str]
    """Figures by step, including those of the environment."""
    is_complete: bool
    """Whether all lines of figures but the last are JSON, and the tables have them."""
    num_left: int
    """Leftover processes."""

    def before(self, step: str) -> int:
        """Count the figures when ``step`` failed, including its own."""
        names = list(BUDGETS)
        return sum(self.counts[name] for name in names[: names.index(step) + 1])


def rehearse(folder: Path, words: Sequence[str], injections: Sequence[Injection], killed_in: str = "") -> Run:
    """Run gpu_check.py with ``injections``; send it SIGKILL at the first figure of the step ``killed_in``."""
    mark, start = new_mark(), time.monotonic()
    script = str(Path(__file__).with_name("gpu_check.py"))
    command = [sys.executable, script, f"--output={folder}", *(["--only", *words] if words else []), "--rehearse"]
    command += [f"{injection.kind}:{injection.step}" for injection in injections]
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / ROWS
    rows.unlink(missing_ok=True)
    with (folder / "printed.log").open("wb") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env={**os.environ, MARK: mark})
        while process.poll() is None:
            time.sleep(POLL_S)
            if killed_in and rows.exists() and f'{{"step": "{killed_in}"' in rows.read_text():
                process.kill()
                process.wait()
    seconds = time.monotonic() - start
    time.sleep(0.5)  # the kernel needs a moment to kill orphans
    *lines, last = rows.read_text().split("\n")
    found = [row for line in [*lines, last] if (row := row_of(line)) is not None]
    tables = (folder / TABLES).read_text()
    is_complete = len(found) >= len(lines) and all(f"\n## {row['step']}\n" in tables for row in found[:-1])
    counts = Counter(row["step"] for row in found)
    return Run(injections, process.returncode, seconds, counts, is_complete, len(marked(mark)))


def problems(run: Run, clean: Run) -> list[str]:
    """Return what is wrong with ``run``; ``clean`` is a run without injected failures."""
    wrong = []
    hit = {injection.step for injection in run.injections}
    expected = -signal.SIGKILL if not hit else 1
    if run.code != expected:
        wrong.append(f"exit code {run.code}, not {expected}")
    if run.seconds > deadline_s("rehearsed"):
        wrong.append(f"{run.seconds:.0f} s")
    if not run.is_complete:
        wrong.append("a file is incomplete")
    if run.num_left:
        wrong.append(f"{run.num_left} processes left")
    for name, count in clean.counts.items() if hit else ():
        if run.counts[name] < (1 if name in hit else count):  # a step fails after its first figure
            wrong.append(f"figures of {name} lost")
    return wrong


def plan_of(names: Sequence[str]) -> list[Injection]:
    """Inject one failure into each step, alternating the kinds."""
    return [Injection(KINDS[index % len(KINDS)], name) for index, name in enumerate(names)]


def rehearse_all(folder: Path, words: Sequence[str]) -> int:
    """Make every step fail in one run, and kill gpu_check.py in another; print the table, return 1 on any problem.

    A third run has no failures. All run at the same time, as hanging steps only wait.
    """
    names = [n for n in BUDGETS if n != ENVIRONMENT and (not words or any(word in n for word in words))]
    measuring = [name for name in names if name in COMMANDS] or [ENVIRONMENT]
    with ThreadPoolExecutor(3) as pool:
        of_clean = pool.submit(rehearse, folder / "clean", words, [])
        of_injected = pool.submit(rehearse, folder / "injected", words, plan_of(names))
        of_killed = pool.submit(rehearse, folder / "killed", words, [], measuring[len(measuring) // 2])
        clean, runs = of_clean.result(), [of_injected.result(), of_killed.result()]
    failed = clean.code != 0 or any(problems(run, clean) for run in runs)
    without = f"without failures: {sum(clean.counts.values())} figures, exit code {clean.code}, {clean.seconds:.0f} s"
    verdict = "FAILED" if failed else "all as expected"
    text = "\n".join([*table_of(runs, clean), "", f"{verdict}; {without}"])
    (folder / "rehearsal.md").write_text(text + "\n")
    print(text)
    return int(failed)


def table_of(runs: Sequence[Run], clean: Run) -> list[str]:
    """Return a line for each injected failure, in the order of the steps."""
    lines = [
        "| injected failure | figures before it | figures at the end | exit code | ended after, limit | problems |"
    ]
    lines.append("|" + "---|" * 6)
    for run in runs:
        total = sum(run.counts.values())
        shown = [(f"{i.kind}: {i.step}", run.before(i.step)) for i in run.injections] or [
            (f"kill: {CHECK_ITSELF}", total)
        ]
        after = f"{run.seconds:.0f} s, {deadline_s('rehearsed'):.0f} s"
        wrong = "; ".join(problems(run, clean)) or "none"
        lines += [f"| {what} | {before} | {total} | {run.code} | {after} | {wrong} |" for what, before in shown]
    return lines


if __name__ == "__main__":
    sys.exit(go_wrong(sys.argv[1], sys.argv[2:]))
