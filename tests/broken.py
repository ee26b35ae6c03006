"""Fault injection for tests: calls that fail, and small file systems."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Breaks:
    """Replaces a method and fails at one call."""

    def __init__(self, call: Any, at: int, error: Exception) -> None:
        self.call, self.left, self.error = call, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.call(*args, **kwargs)


def mount(*options: str, at: Path) -> None:
    """Run ``mount``; skip the test where that is not permitted."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(at)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system in memory."""
    mount("-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", at=folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
