"""Runs the Triton kernels on the CPU in Triton's interpreter, which must be selected at import: in new processes.

With ZCOMM_TEST_DRAWS=10000 hypothesis draws so many cases, here and in tests/zcomm/test_kernels.py.
"""

# covers zcomm/__init__.py

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

TIMEOUT_S = 280 + int(os.environ.get("ZCOMM_TEST_DRAWS", "200"))
ROOT = Path(__file__).parents[2]
FOLDER = "tests/triton_kernels/interpreted"
RUNS = {
    "drawn": [f"{FOLDER}/check_equality.py", "-k", "reference or dispatch"],
    "many blocks": ["tests/zcomm/test_many_blocks.py", "tests/zcomm/test_golden_steps.py"],
    "large tiles, fused, guards, golden": [
        f"{FOLDER}/check_equality.py::test_ten_thousand_blocks",
        f"{FOLDER}/check_equality.py::test_the_largest_block",
        f"{FOLDER}/check_fused.py",
        f"{FOLDER}/check_guards.py",
        "tests/zcomm/test_kernels.py",
        "-k",
        "not test_kernels or native and (golden or strides or another_layout)",
    ],
}
"""The tests of each process, of about equal duration."""


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.triton_kernels.interpreted.plugin"]
    of_run = {"TRITON_INTERPRET": "1", "ZCOMM_KERNELS": "triton", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, f"--timeout={TIMEOUT_S}", *arguments],
        env=os.environ | of_run,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Run all, one process on each core: the interpreter is single-threaded."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        yield {name: cores.submit(_run, arguments) for name, arguments in RUNS.items()}


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("name", RUNS)
def test_interpreted(name: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
