"""Reads the Python stacks of threads, to say what they do and at which line of the user's.

Stacks of other threads are returned as plain values: no frame object of a running thread is kept.

CPython 3.11 creates frame objects lazily. A garbage collection at that moment may release the GIL; the observed thread
runs on, and the new frame object refers to memory that other frames reuse: a crash. So garbage collection is disabled
while stacks are read.

Invariant: only one thread at a time disables and enables garbage collection. Otherwise the first to finish would
enable it while another still reads, and a child forked in between would never collect.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from zcomm._base.rank_context import threads

LIBRARY_DIRS = tuple(str(Path(__file__).parents[2] / name) + "/" for name in ("zcomm", "zero"))
TORCH = str(Path(torch.__file__).parent) + "/"
PYTHON = str(Path(threading.__file__).parent) + "/"
DISTRIBUTED = TORCH + "distributed/"
UNKNOWN = "an unknown line"
_WAITING = tuple(f"_transport/{name}.py" for name in ("tagged", "backend", "store_exchange"))
COLLECTS_WITHIN_FRAMES = sys.version_info[:2] == (3, 11)
_READING = threading.RLock()  # a signal handler may read stacks, too
os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


class StackFrame(NamedTuple):
    file: str
    function: str
    line: int
    instruction: int
    frame: int
    """id() of the frame object; unique while the frame lives."""


def stack(depth: int = 0) -> Iterator[StackFrame]:
    """This thread's frames, innermost first, from the caller on, or from ``depth`` frames further out."""
    return _frames_of(sys._getframe(depth + 1))


def stacks_of(threads: Iterable[int]) -> dict[int, list[StackFrame]]:
    """The stacks of ``threads`` except this one, innermost frame first. Threads that run no Python are left out."""
    wanted = set(threads) - {threading.get_ident()}
    with _no_collection():
        frames = sys._current_frames()
        found = {thread: list(_frames_of(frames[thread])) for thread in wanted if thread in frames}
        # The dict holds this frame: a reference cycle that would keep other threads' tensors alive until a collection.
        frames.clear()
    return found


def _frames_of(frame: FrameType | None) -> Iterator[StackFrame]:
    hidden = threads().hidden_files
    while frame is not None:
        code = frame.f_code
        if code.co_filename not in hidden:
            yield StackFrame(code.co_filename, code.co_name, frame.f_lineno or 0, frame.f_lasti, id(frame))
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


def line_of(stack: Iterable[StackFrame]) -> str:
    """``file:line`` of the innermost frame of ``stack`` outside of this library, torch and the standard library."""
    for place in stack:
        name = place.file
        is_internal = name.startswith((*LIBRARY_DIRS, TORCH, "<"))
        if not is_internal and (not name.startswith(PYTHON) or "site-packages" in name):
            return f"{name}:{place.line}"
    return ""


def describe(thread: int, doing: str) -> str:
    """``doing`` and the user's line. A thread of autograd gets the line of the main thread, which called backward."""
    places = stack(1) if thread == threading.get_ident() else _users_stack(thread)
    return f"{doing} at {line_of(places) or UNKNOWN}"


def is_in_backward(thread: int) -> bool:
    """Whether ``thread`` is in a backward; for a thread of autograd, whether the main thread is."""
    return any(place.function == "_engine_run_backward" for place in _users_stack(thread))


def _users_stack(thread: int) -> list[StackFrame]:
    """The stack of ``thread``, or of the main thread if it contains no line of the user's."""
    main = threads().main_thread().ident or 0
    stacks = stacks_of((thread, main))
    own = stacks.get(thread, [])
    return own if line_of(own) else stacks.get(main, [])


def is_blocked_in(stack: Sequence[StackFrame]) -> str:
    """The call of torch.distributed, or the store exchange, that ``stack`` is blocked in; empty: none.

    Only the innermost Python frame decides: a thread that waits in C++ has the caller of that C++ as innermost frame.
    """
    name = stack[0].file
    if not name.startswith(DISTRIBUTED) and not name.startswith(tuple(LIBRARY_DIRS[0] + part for part in _WAITING)):
        return ""
    found = ""
    for place in takewhile(lambda one: one.file.startswith((TORCH, *LIBRARY_DIRS)), stack):
        if place.file.startswith(DISTRIBUTED) and place.function != "wrapper":
            found = place.function
    what = f"torch.distributed.{found}" if found else "a store exchange"
    return f"waits in {what} at {line_of(stack) or UNKNOWN}"
