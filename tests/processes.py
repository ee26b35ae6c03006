"""Runs a script in a Python of its own: for imports, and for what the first call of a process decides."""

from __future__ import annotations

import os
import subprocess
import sys
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
