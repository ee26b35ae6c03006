"""Runs the tests on the mutants of listed.py: ``python -m tests.mutants.run [--only TEXT] [--seconds N]``.

Each is made in a copy of the repository, and its tests run there; before, they have passed in the copy as it is.
Those of C++ are built there first, with cmake.
Outcomes are kept in tests/mutants/outcomes.json, by the text of the mutant: a later call goes on where this one
stopped. ``--table`` prints them for README.md.

    caught        a test failed, because of what it checks
    survived      all passed: a test is missing
    late          a test failed by a timeout, and the mistake is no hang by nature: says nothing
    broken        the copy cannot be imported, or a name is missing: no mistake that anybody would make
    not applied   the text to replace is not there once

Most of what a run of pytest costs is importing torch. This process does it once, and forks for each run; there, what
ranks are is a fork, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
OUTCOMES = Path(__file__).parent / "outcomes.json"
PRELOADED = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.testing", "pytest", "numpy",
)  # fmt: skip
OURS = re.compile(r"(tests|zcomm|zero|triton_kernels)(\.|$)")
TIMEOUT_S = 240
BATCH = 6
"""Tests that ran together on the unmodified copy, and whether they passed."""
LATE = re.compile(r"no answer in time|Timed out waiting|Timeout \(?>|\+ Timeout \+")
BROKEN = re.compile(r"\b(SyntaxError|IndentationError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError): ")
ERROR = re.compile(r"^E\s+(?:[\w.]+Error|Failed)\b(?!: rank \d).*$", re.MULTILINE)
FAILED = re.compile(r"^FAILED ((?:cpp/)?tests/\S+?\.(?:py|cc)::.*?)(?: - (.*))?$", re.MULTILINE)
Outcome = dict[str, str]


def key_of(mutant: Mutant) -> str:
    """A key that changes if anything of the mutant changes."""
    return f"{zlib.crc32(repr(mutant).encode()):08x}"


class Copy:
    """A copy of the tracked files and the compiled module in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stamp = folder, 10**9
        words = ["git", "ls-files"]
        files = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        for name in files:
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        find = "import zcomm._native; print(zcomm._native.__file__)"
        native = subprocess.run([sys.executable, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
        for compiled in (Path(native), Path(native).with_name("_emulated_nccl.so")):
            (folder / "zcomm" / compiled.name).symlink_to(compiled)
        (folder / "zcomm" / "triton_kernels").symlink_to(folder / "triton_kernels")

    def read(self, file: str) -> str:
        return (self._folder / file).read_text()

    def write(self, file: str, text: str) -> None:
        """Change one file. Its new modification time invalidates old bytecode, also within a second."""
        path, self._stamp = self._folder / file, self._stamp + 10
        path.write_text(text)
        if path.suffix == ".py":
            os.utime(path, (self._stamp, self._stamp))

    def run(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """Run tests until one fails: pytest's exit status, None if it took too long, and its output."""
        of_cpp = [test for test in tests if test.startswith("cpp/")]
        if not of_cpp:
            return self._run_python(tests)
        code, text = self._run_cpp(of_cpp)
        of_python = [test for test in tests if test not in of_cpp]
        return (code, text) if code != 0 or not of_python else self._run_python(of_python)

    def _run_cpp(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """``cpp/tests/NAME.cc::CHECK``: build NAME, and run that check of it. As pytest: 1 if it fails, 2 if broken.

        Without CHECK all of NAME is run, at every ISA level that it has.
        """
        build, text = self._folder / "build-mutants", ""
        options = ["-DZCOMM_BUILD_TESTS=ON", "-DZCOMM_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
        for test in tests:
            name, check = Path(test.split("::")[0]).stem, test.split("::")[1]
            for words in (
                ["cmake", "-S", str(self._folder), "-B", str(build), *options],
                ["cmake", "--build", str(build), "--target", name],
            ):
                done = subprocess.run(words, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    return 2, done.stdout + done.stderr
            try:
                every_level = ["ctest", "--test-dir", str(build), "--output-on-failure", "-R", f"^{name}(_[a-z0-9]+)?$"]
                run = [str(build / "cpp" / "tests" / name), check] if check else every_level
                done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return None, text
            output = (done.stdout + done.stderr).strip()
            text += f"{output}\n"
            if done.returncode != 0:
                return 1, f"{text}FAILED {test} - {(output.splitlines() or ['no output'])[-1]}\n"
        return 0, text

    def _run_python(self, tests: Sequence[str]) -> tuple[int | None, str]:
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                self._live(tests, output.fileno())
            code, stop = None, time.monotonic() + TIMEOUT_S
            while code is None and time.monotonic() < stop:
                ended, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the ranks, too
            if code is None:
                os.waitpid(pid, 0)
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def _live(self, tests: Sequence[str], output: int) -> None:
        """Run the tests in the fork; does not return."""
        code = 99
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self._folder)
            os.environ.update(PYTHONPATH=str(self._folder), ZCOMM_TEST_TIMEOUT_S="120")
            # an editable install has a finder that would find the repository instead of the copy
            sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
            sys.path.insert(0, str(self._folder))
            for name in [name for name in sys.modules if OURS.match(name)]:
                del sys.modules[name]
            ranks = importlib.import_module("tests.ranks")
            assert Path(str(ranks.__file__)).is_relative_to(self._folder), "another copy"
            ranks.forkserver = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
            words = ["-q", "-x", "-p", "no:cacheprovider", "--tb=short", "--rootdir=.", *tests]
            code = int(importlib.import_module("pytest").main(words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def is_late(code: int | None, text: str) -> bool:
    """Whether all failures are timeouts: ranks wait for one that has failed."""
    if code is None:
        return True
    errors = [line for line in ERROR.findall(text) if not LATE.search(line)]
    return bool(LATE.search(text)) and not errors


def outcome_of(mutant: Mutant, copy: Copy) -> Outcome:
    """Run the tests of ``mutant`` in the copy until one fails."""
    before = copy.read(mutant.file)
    if before.count(mutant.old) != 1:
        return {"outcome": "not applied", "by": f"{before.count(mutant.old)} places in {mutant.file}"}
    copy.write(mutant.file, before.replace(mutant.old, mutant.new))
    try:
        code, text = copy.run(mutant.tests)
    finally:
        copy.write(mutant.file, before)
    if is_late(code, text):
        return {"outcome": "caught" if mutant.hangs else "late", "by": "a timeout"}
    if code == 0:
        return {"outcome": "survived", "by": ""}
    failed = FAILED.search(text)
    if code != 1 or failed is None or BROKEN.search(text):
        return {"outcome": "broken", "by": text.strip().splitlines()[-1]}
    return {"outcome": "caught", "by": failed[1]}


def check_unmutated(copy: Copy, tests: list[str], outcomes: dict[str, Outcome]) -> bool:
    """Run ``tests`` in the unmodified copy and remember that they pass; return False after a timeout."""
    code, text = copy.run(tests)
    last = text.strip().splitlines()[-1] if text.strip() else "a timeout"
    print(f"{'as it is':12} {last}", flush=True)
    if is_late(code, text):
        return False
    if code != 0 or "skipped" in last:
        raise SystemExit(f"without a mistake, these must pass: {tests}\n{text}")
    outcomes.update({test: {"outcome": "passed", "by": "the copy as it is"} for test in tests})
    save(outcomes)
    return True


def save(outcomes: dict[str, Outcome]) -> None:
    """Save the outcomes for the next call."""
    OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")


def table(outcomes: dict[str, Outcome]) -> str:
    """A Markdown table of all mutants and their outcomes."""
    rows = ["| Mutant | File | Outcome | By |", "|---|---|---|---|"]
    for mutant in MUTANTS:
        outcome = outcomes.get(key_of(mutant), {"outcome": "not run", "by": ""})
        by = outcome["by"].removeprefix("tests/").replace("|", "/")
        rows.append(f"| {mutant.name} | `{mutant.file}` | {outcome['outcome']} | {by and f'`{by}`'} |")
    return "\n".join(rows)


def main() -> int:
    """Run the mutants that have no outcome yet."""
    parser = argparse.ArgumentParser(description="Run the mutants that have no outcome yet.")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name has it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no other after so long")
    parser.add_argument("--table", action="store_true", help="print the outcomes, run nothing")
    chosen = parser.parse_args()
    outcomes: dict[str, Outcome] = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    if chosen.table:
        print(table(outcomes))
        return 0
    stop = time.monotonic() + chosen.seconds
    missing = [mutant for mutant in MUTANTS if key_of(mutant) not in outcomes and chosen.only in mutant.name]
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as name:
        copy = Copy(Path(name))
        while missing and time.monotonic() < stop:
            first = min(missing, key=lambda mutant: sum(test not in outcomes for test in mutant.tests))
            tests = [test for mutant in (first, *missing) for test in mutant.tests if test not in outcomes]
            if any(test not in outcomes for test in first.tests):
                if not check_unmutated(copy, list(dict.fromkeys(tests))[: max(BATCH, len(first.tests))], outcomes):
                    missing.remove(first)
                continue
            missing.remove(first)
            started = time.monotonic()
            outcome = outcomes[key_of(first)] = outcome_of(first, copy)
            save(outcomes)
            print(
                f"{outcome['outcome']:12} {first.name}: {outcome['by']} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
    return 1 if any(outcomes.get(key_of(m), {}).get("outcome") == "survived" for m in MUTANTS) else 0


if __name__ == "__main__":
    sys.exit(main())
