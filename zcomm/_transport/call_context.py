"""Which public call a thread is in, and where in the user's program: what exchanges belong to, and what errors name.

    with calling("state_dict"):       the outermost one counts: what it calls belongs to it

A collective that a queue's thread drives goes on in the context of the thread that has called it (:func:`here`).

Stacks of other threads, as plain values: no frame object of a running thread is kept.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from itertools import count, takewhile
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

COLLECTS_WITHIN_FRAMES = sys.version_info[:2] == (3, 11)
_READING = threading.RLock()  # a signal handler may read stacks, too
os.register_at_fork(before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release)


class StackFrame(NamedTuple):
    """One frame of a stack."""

    file: str
    function: str
    line: int
    instruction: int
    frame: int
    """Its identity, while it lives."""


def stack(depth: int = 0) -> Iterator[StackFrame]:
    """This thread's, innermost first, from the caller on, or from ``depth`` frames further out."""
    return _places(sys._getframe(depth + 1))


def stacks_of(threads: Iterable[int]) -> dict[int, list[StackFrame]]:
    """Those of ``threads``, this one not among them, innermost first; what runs no Python is left out."""
    wanted = set(threads) - {threading.get_ident()}
    with _no_collection():
        frames = sys._current_frames()
        found = {thread: list(_places(frames[thread])) for thread in wanted if thread in frames}
        frames.clear()  # this frame is in it: it would keep itself, and what other threads hold, until a collection
    return found


def _places(frame: FrameType | None) -> Iterator[StackFrame]:
    while frame is not None:
        code = frame.f_code
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


OWN = tuple(str(Path(__file__).parents[1] / name) + "/" for name in ("zcomm", "zero"))
TORCH = str(Path(torch.__file__).parent) + "/"
PYTHON = str(Path(threading.__file__).parent) + "/"
DISTRIBUTED = TORCH + "distributed/"


class Context(NamedTuple):
    """What a thread's exchanges belong to."""

    call: str = ""
    """The outermost public call; empty: forward, backward, or none of ours."""
    bucket: str = ""
    """What it is done for."""
    depth: int = 0
    within: str = ""
    """A public call that errors name all the same, though other ranks may be in another."""
    goes_on: bool = False
    """Whether the caller computes while its exchange runs: the call was made with ``async_op=True``."""


class _Here(threading.local):
    context = Context()


_HERE = _Here()
UNKNOWN = "an unknown line"
_TURNS = count(1)
_TURN = [0]
"""Changes whenever an outermost call begins or ends: what was noted before is old."""
_NOTES: dict[int, tuple[int, Callable[[], str]]] = {}
"""By thread: in which turn it was noted, and what the thread is about to do."""


def here() -> Context:
    """What this thread's exchanges belong to."""
    return _HERE.context


@contextmanager
def entered(context: Context) -> Iterator[None]:
    """Exchanges inside belong to ``context``, of another thread."""
    before, _HERE.context = _HERE.context, context
    try:
        yield
    finally:
        _HERE.context = before


@contextmanager
def in_bucket(name: str) -> Iterator[None]:
    """Collectives called inside are for bucket ``name``, on every rank: their exchanges meet no other bucket's."""
    before = _HERE.context
    _HERE.context = before._replace(bucket=name)
    try:
        yield
    finally:
        _HERE.context = before


@contextmanager
def in_no_call() -> Iterator[None]:
    """Exchanges inside belong to forward and backward, whichever public call this thread is in."""
    context = _HERE.context
    with entered(Context(bucket=context.bucket, within=context.call or context.within)):
        yield


class calling(ContextDecorator):  # noqa: N801  (a context manager)
    """Inside, or inside the function decorated with it, exchanges belong to the public call ``name``.

    Exchanges of different calls never meet. ``name`` is the same on every rank that makes the same call, and holds what
    must be equal of its arguments.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        context = _HERE.context
        if context.depth == 0:
            _TURN[0] = next(_TURNS)
        _HERE.context = context._replace(call=context.call or self._name, depth=context.depth + 1)

    def __exit__(self, *_: object) -> None:
        context = _HERE.context
        if context.depth == 1:
            _TURN[0] = next(_TURNS)
        _HERE.context = context._replace(call=context.call if context.depth > 1 else "", depth=context.depth - 1)


def note(doing: Callable[[], str]) -> None:
    """What this thread is about to do, in words that are asked for if ranks wait for one another."""
    _NOTES[threading.get_ident()] = _TURN[0], doing


def noted(thread: int) -> str:
    """What ``thread`` is about to do, if that is not over."""
    turn, doing = _NOTES.get(thread, (-1, str))
    return doing() if turn == _TURN[0] else ""


def line_of(stack: Iterable[StackFrame]) -> str:
    """``file:line`` of the first of ``stack``, innermost first, that is neither ours, nor torch's, nor Python's own."""
    for place in stack:
        name = place.file
        if not name.startswith((*OWN, TORCH, "<")) and (not name.startswith(PYTHON) or "site-packages" in name):
            return f"{name}:{place.line}"
    return ""


def describe(thread: int, doing: str) -> str:
    """What ``thread`` does, and its line: for a thread of autograd that of the main thread, which called backward."""
    if thread == threading.get_ident():
        return f"{doing} at {line_of(stack(1)) or UNKNOWN}"
    return f"{doing} at {line_of(_users_stack(thread)) or UNKNOWN}"


def is_in_backward(thread: int) -> bool:
    """Whether ``thread``, or the main thread for one of autograd's, runs a backward."""
    return any(place.function == "_engine_run_backward" for place in _users_stack(thread))


def _users_stack(thread: int) -> list[StackFrame]:
    """That of ``thread``, or of the main thread if none of the user's lines is in it."""
    main = threading.main_thread().ident or 0
    stacks = stacks_of((thread, main))
    own = stacks.get(thread, [])
    return own if line_of(own) else stacks.get(main, [])


def is_blocked_in(stack: Sequence[StackFrame]) -> str:
    """What of torch.distributed, or of ours outside of every Topology, ``stack`` waits in, if it does; empty: nothing.

    Only the innermost Python frame is looked at: one whose C++ waits there is in no other.
    """
    name = stack[0].file
    if not name.startswith(DISTRIBUTED) and not name.startswith(tuple(OWN[0] + part for part in _WAITING)):
        return ""
    found = ""
    for place in takewhile(lambda one: one.file.startswith((TORCH, *OWN)), stack):
        if place.file.startswith(DISTRIBUTED) and place.function != "wrapper":
            found = place.function
    what = f"torch.distributed.{found}" if found else "a meeting of ranks"
    return f"waits in {what} at {line_of(stack) or UNKNOWN}"


_WAITING = ("tagged.py", "backend.py", "meeting.py", "starts.py")
