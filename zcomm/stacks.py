"""Stacks of other threads, as plain values: no frame of a thread that goes on is kept.

CPython 3.11 makes a frame object when it is asked for one, and a garbage collection in the midst of that lets its
thread go on: the object then stands for memory that other frames use. So nothing is collected while stacks are read.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

__all__ = ["Place", "stack", "stacks_of"]

COLLECTS_WITHIN_FRAMES = sys.version_info[:2] == (3, 11)


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
    if not (COLLECTS_WITHIN_FRAMES and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
