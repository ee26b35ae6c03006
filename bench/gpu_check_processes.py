"""Start and kill the processes of gpu_check.py: none outlives the one that started it, however that one ends.

A step leads a process group, which is killed as a whole. What has left the group (torchrun's ranks have) is found by a
mark in its environment. And the kernel is asked to kill a child when its parent ends: a step after a SIGKILL of
gpu_check.py, a rank after that of its step. Nothing here needs more than Python's standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["MARK", "die_with_parent", "marked", "new_mark", "stop"]

MARK = "GPU_CHECK_MARK"
"""The environment variable that every process of one check has."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before a fork, in which nothing may be loaded


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends; Popen's ``preexec_fn``."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def new_mark() -> str:
    """One that no other check has."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """The ids of the other processes whose environment has ``mark``."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return [process for process in found if process != os.getpid()]


def stop(process: subprocess.Popen[bytes], mark: str, grace_s: float) -> None:
    """End ``process``, the group it leads and what has ``mark``; kindly at first, if it runs itself."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    for other in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
