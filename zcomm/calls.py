"""Which public call a thread is in, and where in the user's program: what exchanges belong to, and what errors name.

    with calling("state_dict"):       the outermost one counts: what it calls belongs to it

A collective that a queue's thread drives goes on in the context of the thread that has called it (:func:`here`).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = [
    "Context",
    "calling",
    "describe",
    "entered",
    "here",
    "in_bucket",
    "in_no_call",
    "is_blocked_in",
    "line_of",
    "note",
    "noted",
]

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
_TURNS = itertools.count(1)
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


def line_of(frame: FrameType | None) -> str:
    """``file:line`` of the innermost frame from ``frame`` on that is neither ours, nor torch's, nor Python's own."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*OWN, TORCH, "<")) and (not name.startswith(PYTHON) or "site-packages" in name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def frames_of(threads: Iterable[int]) -> dict[int, FrameType]:
    """Where ``threads``, not this one among them, are now; what runs no Python is left out."""
    frames = sys._current_frames()
    found = {thread: frames[thread] for thread in threads if thread in frames and thread != threading.get_ident()}
    frames.clear()  # this frame is in it: it would keep itself, and what other threads hold, until the next collection
    return found


def describe(thread: int, doing: str) -> str:
    """What ``thread`` does, and its line: for a thread of autograd that of the main thread, which called backward."""
    if thread == threading.get_ident():
        return f"{doing} at {line_of(sys._getframe(1)) or UNKNOWN}"
    main = threading.main_thread().ident or 0
    frames = frames_of((thread, main))
    return f"{doing} at {line_of(frames.get(thread)) or line_of(frames.get(main)) or UNKNOWN}"


def is_in_backward(thread: int) -> bool:
    """Whether ``thread``, or the main thread for one of autograd's, runs a backward."""
    main = threading.main_thread().ident or 0
    frames = frames_of((thread, main))
    frame = frames.get(thread)
    if not line_of(frame):
        frame = frames.get(main)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def is_blocked_in(frame: FrameType) -> str:
    """What of torch.distributed, or of ours outside of every Topology, ``frame`` waits in, if it does; empty: nothing.

    Only the innermost Python frame is looked at: one whose C++ waits there is in no other.
    """
    name = frame.f_code.co_filename
    if not name.startswith(DISTRIBUTED) and not name.startswith(tuple(OWN[0] + part for part in _WAITING)):
        return ""
    found, at = "", frame
    while at is not None and at.f_code.co_filename.startswith((TORCH, *OWN)):
        if at.f_code.co_filename.startswith(DISTRIBUTED) and at.f_code.co_name != "wrapper":
            found = at.f_code.co_name
        at = at.f_back  # type: ignore[assignment]
    what = f"torch.distributed.{found}" if found else "a meeting of ranks"
    return f"waits in {what} at {line_of(frame) or UNKNOWN}"


_WAITING = ("tagged.py", "backend.py", "meeting.py", "starts.py")
