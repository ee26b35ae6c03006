"""Check and measure on this machine everything that needs a GPU: one command, no network.

    bench/gpu_check.sh              under 8 minutes
    bench/gpu_check.sh --quick      under 2
    bench/gpu_check.sh --no-build   with the package as it is installed

It builds the package for this GPU's architecture alone, with the torch, nanobind and scikit-build-core that are there;
runs the tests marked ``gpu`` (every kernel against the reference, several ranks that share the GPU over NCCL, streams);
compute-sanitizer on the tests of the CUDA kernels; then the benchmarks: kernels beside a copy, the main job, offload.
Each step has a time limit of its own, and what it prints goes to a file under ``--output``.

It ends with a table of the steps, and writes it, with the machine, the versions and the rows of the benchmarks, to
``bench/results/gpu_NAME.md``. Exit code:

    0   every step passed, or was skipped for the reason that is shown
    1   a step failed, or its time was over
    2   wrong options
    3   there is no GPU that torch can use: nothing was checked, and the reason is shown
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from gpu_check_machine import TEST_PACKAGES, Machine, look
from gpu_check_plan import Plan, make_steps
from gpu_check_steps import Outcome, all_passed, run_steps, table

NO_GPU = 3
DEADLINE_S, QUICK_DEADLINE_S = 465.0, 115.0
RESULTS = Path(__file__).parent / "results"
SHOWN = ("beside", "main job", "offload")
"""Steps with one of these in their names are shown with what they have printed."""
MAX_LINES = 60


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer formats and sizes, under 2 minutes")
    parser.add_argument("--no-build", action="store_true", help="use the package as it is installed")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), help="folder of what steps print")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table that is kept")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="steps with one of these in their names")
    parser.add_argument("--commit", default="", help="what was checked, where the tree is not under git")
    return parser.parse_args()


def without_gpu(machine: Machine) -> str:
    """What can be said on a machine without a GPU."""
    problem = machine.build_problem()
    packages = machine.missing(TEST_PACKAGES)
    return "\n".join(
        [
            f"No GPU: {machine.reason}.",
            f"The CUDA kernels {'could be compiled here' if not problem else f'cannot be compiled here: {problem}'}.",
            f"Packages that the tests want and that are missing: {', '.join(packages) or 'none'}.",
            "Nothing was built, tested or measured: run this where nvidia-smi shows a GPU and torch is built for CUDA.",
        ]
    )


def facts_table(machine: Machine) -> str:
    """The machine, as a Markdown table."""
    rows = [f"| {name} | {text.replace('|', '/')} |" for name, text in machine.facts.items()]
    return "\n".join(["| fact | value |", "|---|---|", *rows])


def results_path(folder: Path, machine: Machine) -> Path:
    """The file of this GPU."""
    assert machine.gpu is not None, "results are of a GPU"
    name = re.sub(r"[^a-z0-9]+", "_", machine.gpu.name.lower()).strip("_")
    return folder / f"gpu_{name}.md"


def document(machine: Machine, outcomes: Sequence[Outcome], command: str, seconds: float) -> str:
    """What is kept: machine, steps, and what the benchmarks printed."""
    assert machine.gpu is not None, "results are of a GPU"
    verdict = "every step passed or was skipped" if all_passed(outcomes) else "a step failed"
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    parts = [
        f"# {machine.gpu.name}",
        f"`{command}`, {day}, {seconds:.0f} s: {verdict}.",
        facts_table(machine),
        table(outcomes),
    ]
    for outcome in outcomes:
        if outcome.log is not None and any(word in outcome.name for word in SHOWN):
            parts.append(f"## {outcome.name}\n\n{printed(outcome.log.read_text(errors='replace'))}")
    return "\n\n".join(parts) + "\n"


def printed(text: str) -> str:
    """What a benchmark printed: its JSON rows as a table, else its last lines without progress bars."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"operation"')]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_number(row.get(name, "-")) for name in names] for row in rows]
        lines = [names, ["---"] * len(names), *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    kept = [line for line in text.replace("\r", "\n").splitlines() if line.strip() and "/s]" not in line]
    return "\n".join(["```", *kept[-MAX_LINES:], "```"])


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Look, run the steps, and say what became of them."""
    arguments = parse_arguments()
    start = time.monotonic()
    machine = look(arguments.commit)
    print(facts_table(machine), flush=True)
    if machine.gpu is None:
        print(f"\n{without_gpu(machine)}")
        return NO_GPU
    plan = Plan(machine, arguments.quick, not arguments.no_build, arguments.output)
    deadline_s = QUICK_DEADLINE_S if arguments.quick else DEADLINE_S
    if missing := machine.missing(TEST_PACKAGES):
        print(f"\nnot installed, done without as far as possible: {', '.join(missing)}", flush=True)

    def say(outcome: Outcome) -> None:
        print(f"{outcome.verdict:>5} {outcome.seconds:6.1f} s  {outcome.name}: {outcome.note}", flush=True)

    steps = make_steps(plan)
    if arguments.only:
        steps = [step for step in steps if any(word in step.name for word in arguments.only)]
    outcomes = run_steps(steps, arguments.output, deadline_s=deadline_s, report=say)
    command = "bench/gpu_check.sh" + " --quick" * arguments.quick + " --no-build" * arguments.no_build
    command += f" --only {' '.join(arguments.only)}" if arguments.only else ""
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = results_path(arguments.results, machine)
    path.write_text(document(machine, outcomes, command, time.monotonic() - start))
    print(f"\n{table(outcomes)}\n\nwritten to {path}; what the steps printed is in {arguments.output}")
    return 0 if all_passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
