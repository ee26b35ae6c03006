"""Stacks of other threads, as plain values: no frame object of a running thread is kept.

CPython 3.11 creates frame objects lazily. A garbage collection during that may release the GIL, so that the observed
thread runs on, and the new object refers to memory that other frames reuse: a crash. So the collector is off while
stacks are read.

Invariant: one thread at a time switches the collector off and on again. Otherwise the first to end would switch it on
while another still reads, and a child forked meanwhile would never collect anything.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

__all__ = ["Place", "stack", "stacks_of"]

COLLECTS_WITHIN_FRAMES = sys.version_info[:2] == (3, 11)
_READING = threading.RLock()  # a signal handler may read stacks, too
os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


class Place(NamedTuple):
    """One frame of a stack."""

    file: str
    function: str
    line: int
    instruction: int
    frame: int
    """Its identity, while it lives."""


def stack(depth: int = 0) -> Iterator[Place]:
    """This thread's, innermost first, from the caller on, or from ``depth`` frames further out."""
    return _places(sys._getframe(depth + 1))


def stacks_of(threads: Iterable[int]) -> dict[int, list[Place]]:
    """Those of ``threads``, this one not among them, innermost first; what runs no Python is left out."""
    wanted = set(threads) - {threading.get_ident()}
    with _no_collection():
        frames = sys._current_frames()
        found = {thread: list(_places(frames[thread])) for thread in wanted if thread in frames}
        frames.clear()  # this frame is in it: it would keep itself, and what other threads hold, until a collection
    return found


def _places(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        code = frame.f_code
        yield Place(code.co_filename, code.co_name, frame.f_lineno or 0, frame.f_lasti, id(frame))
        frame = frame.f_back


@contextmanager
def _no_collection() -> Iterator[None]:
    if not COLLECTS_WITHIN_FRAMES:
        yield
        return
    with _READING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
