"""Start and kill the processes of gpu_check.py: no process outlives its parent, however the parent ends.

A step leads a process group, and the full group is killed. Processes that have left the group, as torchrun's ranks do,
are found by a mark in their environment. The kernel also kills a child when its parent ends (PR_SET_PDEATHSIG): a step
after SIGKILL of gpu_check.py, a rank after SIGKILL of its step. This module needs only Python's standard library.
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
"""Environment variable that all processes of one check have."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before the fork: loading in the child may deadlock


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends; to be passed as Popen's ``preexec_fn``."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def new_mark() -> str:
    """Return a unique mark."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Return the ids of the other processes whose environment has ``mark``."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if wanted in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return [process for process in found if process != os.getpid()]


def stop(process: subprocess.Popen[bytes], mark: str, grace_s: float) -> None:
    """End ``process``, its process group and all processes with ``mark``: first SIGTERM, then SIGKILL."""
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
