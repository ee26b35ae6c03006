"""Check and measure everything that needs a GPU on this machine: one command, no network, within 9 minutes.

    bench/gpu_check.sh --output FOLDER      all steps; FOLDER has all results so far at any moment
    bench/gpu_check.sh --quick              within 2 minutes
    bench/gpu_check.sh --no-build           use the installed package, or the source tree
    bench/gpu_check.sh --rehearse           tiny steps on the CPU; with injected failures: --rehearse kill:offload
    bench/gpu_check.sh --rehearse all       make every step fail, hang or be killed, and kill this process, too

Measurements come first: kernels compared with a copy, collectives, training steps, first calls, CUDA graphs, offload;
then every mode beside the CPU, tests against the CPU reference, and sanitizers. Before that the package is built, for
this GPU's architecture only and with installed tools; if that fails, its source tree is used, which has the Triton
kernels and torch's NCCL.

Every figure is written as soon as it is measured, to ``figures.jsonl`` and ``figures.md``, so that it survives a crash;
output goes to ``steps.log``. Each step has a time budget; later steps get what earlier ones do not use. At the end a
table of the steps is printed. Exit code:

    0   every step passed, or was skipped with the reason shown
    1   a step failed, exceeded its time, or measured nothing although it should
    2   wrong options
    3   torch cannot use a GPU here: nothing was checked; the reason is shown
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from gpu_check_machine import TEST_PACKAGES, Machine, look
from gpu_check_package import Package
from gpu_check_plan import BUDGETS, ENVIRONMENT, PACKAGE, Mode, Plan, deadline_s, make_steps
from gpu_check_record import PASS, TABLES, Outcome, Record, table
from gpu_check_rehearsal import Injection, injected, parse_injection, rehearse_all
from gpu_check_steps import Place, Step, all_passed, run_steps

NO_GPU = 3
ALL = "all"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer formats and sizes, within 2 minutes")
    parser.add_argument("--no-build", action="store_true", help="use the installed package, or the source tree")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), help="folder for all output")
    parser.add_argument("--results", type=Path, help="folder to copy the tables to at the end, as gpu_NAME.md")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="run only steps whose names contain one of these words"
    )
    parser.add_argument("--commit", default="", help="commit to report if the tree is not a git repository")
    parser.add_argument(
        "--rehearse",
        nargs="*",
        metavar="KIND:STEP",
        help="run on the CPU, with injected failures; KIND is fail, hang or kill",
    )
    arguments = parser.parse_args()
    arguments.injections = []
    if arguments.rehearse is not None and arguments.rehearse != [ALL]:
        names = [name for name in BUDGETS if name != ENVIRONMENT]
        try:
            arguments.injections = [parse_injection(text, names) for text in arguments.rehearse]
        except ValueError as error:
            parser.error(str(error))
    return arguments


def without_gpu(machine: Machine) -> str:
    """Describe what a machine without a GPU could do."""
    problem = machine.build_problem()
    packages = machine.missing(TEST_PACKAGES)
    return "\n".join(
        [
            f"No GPU: {machine.reason}.",
            f"The CUDA kernels {'could be compiled here' if not problem else f'cannot be compiled here: {problem}'}.",
            f"Packages that the tests need and that are missing: {', '.join(packages) or 'none'}.",
            "Nothing was built, tested or measured: run this where nvidia-smi shows a GPU and torch is built for CUDA.",
        ]
    )


def results_path(folder: Path, machine: Machine) -> Path:
    """Return the path of this GPU's results."""
    assert machine.gpu is not None, "results are of a GPU"
    name = re.sub(r"[^a-z0-9]+", "_", machine.gpu.name.lower()).strip("_")
    return folder / f"gpu_{name}.md"


def chosen_steps(plan: Plan, words: list[str], injections: list[Injection]) -> list[Step]:
    """Return the requested steps, with their injected failures."""
    kinds = {injection.step: injection.kind for injection in injections}
    steps = [step for step in make_steps(plan) if not words or any(word in step.name for word in words)]
    return [injected(step, kinds[step.name]) if step.name in kinds else step for step in steps]


class Check:
    """One run of the steps on ``machine``."""

    def __init__(self, plan: Plan, title: str, started_at: float) -> None:
        """Create the files in the plan's output, and record the machine's facts as the first step."""
        self._started_at, self._plan = started_at, plan
        self._scratch = Path(tempfile.mkdtemp(prefix="gpu_check-"))
        self._package = Package(self._scratch / "source")
        self._place: Place | None = None
        self.record = Record(plan.output, title)
        self.record.start_step(ENVIRONMENT)
        self._write_facts(plan.machine.facts)
        missing = plan.machine.missing(TEST_PACKAGES)
        note = f"not installed (tests run without them where possible): {', '.join(missing)}" if missing else ""
        self.outcomes = [Outcome(ENVIRONMENT, PASS, time.monotonic() - started_at, note, len(plan.machine.facts))]
        self.record.end_step(self.outcomes[0])

    def run(self, steps: list[Step]) -> int:
        """Run ``steps``, print the table and return the exit code."""
        spent_s = getattr(BUDGETS[ENVIRONMENT], self._plan.mode)
        try:
            self.outcomes += run_steps(
                steps,
                self.record,
                started_at=self._started_at,
                spent_s=spent_s,
                place=self._find_place,
                report=_print_outcome,
            )
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        failed = [outcome.name for outcome in self.outcomes if not all_passed([outcome])]
        verdict = f"failed: {', '.join(failed)}" if failed else "every step passed or was skipped"
        self.record.finish(verdict)
        print(f"\n{table(self.outcomes)}\n\n{verdict}; written to {self.record.folder / TABLES}", flush=True)
        return 1 if failed else 0

    def _find_place(self) -> Place:
        """Return the source tree for the step that builds the package; later where the package is found."""
        if self._place is None and self.record.step == PACKAGE:
            return Place(Path(__file__).parents[1], {})
        if self._place is None:
            self._place = self._package.find()
            origin = "installed" if self._package.is_installed else "not installed: a copy of the source tree"
            self._write_facts({"package": origin, **self._package.facts})
        return self._place

    def _write_facts(self, facts: dict[str, str]) -> None:
        for name, text in facts.items():
            self.record.add_figure({"fact": name, "value": text, "num_wrong": 0}, step=ENVIRONMENT)


def _print_outcome(outcome: Outcome) -> None:
    print(f"{outcome.verdict:>5} {outcome.seconds:6.1f} s  {outcome.name}: {outcome.note}", flush=True)


def main() -> int:
    """Inspect the machine, run the steps and report."""
    started_at, arguments = time.monotonic(), parse_arguments()
    if arguments.rehearse == [ALL]:
        return rehearse_all(arguments.output, arguments.only)
    mode: Mode = "rehearsed" if arguments.rehearse is not None else "quick" if arguments.quick else "full"
    machine = look(arguments.commit)
    if machine.gpu is None and mode != "rehearsed":
        print("\n".join(f"{name}: {text}" for name, text in machine.facts.items()))
        print(f"\n{without_gpu(machine)}")
        return NO_GPU
    name = machine.gpu.name if machine.gpu and mode != "rehearsed" else "Rehearsal on the CPU"
    plan = Plan(machine, mode, not arguments.no_build, arguments.output.resolve())
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    check = Check(plan, f"{name}, bench/gpu_check.sh {' '.join(sys.argv[1:])}, {day}", started_at)
    print(f"results in {plan.output}; all steps end within {deadline_s(mode):.0f} s", flush=True)
    code = check.run(chosen_steps(plan, arguments.only, arguments.injections))
    if arguments.results is not None and machine.gpu is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
        shutil.copy(plan.output / TABLES, results_path(arguments.results, machine))
    return code


if __name__ == "__main__":
    sys.exit(main())
