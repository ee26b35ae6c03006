"""Runs a script in a Python of its own, for imports and for what the first call of a process decides; or a function in
a fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``script``, with more ``variables`` of the environment; it may import ``tests``."""
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def in_fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; return its status from ``waitpid``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return ended[1]
