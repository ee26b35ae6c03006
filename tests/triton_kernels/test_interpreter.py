"""The Triton kernels on the CPU, in Triton's interpreter: in processes of their own, for it is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "tests/triton_kernels/interpreted"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arguments",
    [
        [f"{FOLDER}/check_equality.py", "-k", "reference or dispatch"],
        [f"{FOLDER}/check_equality.py", "-k", "ten_thousand"],
        [f"{FOLDER}/check_equality.py", "-k", "largest"],
        [f"{FOLDER}/check_fused.py"],
        ["tests/zcomm/test_kernels.py", "-k", "native and (golden or strides or another_layout)"],
    ],
    ids=["drawn", "many blocks", "large blocks", "fused", "golden"],
)
def test_interpreted(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.triton_kernels.interpreted.plugin", "--timeout=280"]
    done = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "ZCOMM_KERNELS": "triton", "PYTEST_ADDOPTS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
