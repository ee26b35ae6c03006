"""Which model a checkpointed call belongs to: the one whose forward runs in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from zero._activations.checkpointer import Checkpointer


class _RunningForwards(threading.local):
    """Innermost last."""

    def __init__(self) -> None:
        self.entries: list[tuple[object, Checkpointer | None]] = []


_RUNNING = _RunningForwards()


def current() -> Checkpointer | None:
    """The innermost; None: checkpoints are torch's own."""
    return _RUNNING.entries[-1][1] if _RUNNING.entries else None


def push(owner: object, checkpointer: Checkpointer | None) -> None:
    """``owner`` begins to run."""
    _RUNNING.entries.append((owner, checkpointer))


def pop(owner: object) -> None:
    """``owner``'s last run has ended, and what began in it and was broken off."""
    entries = _RUNNING.entries
    for index in range(len(entries) - 1, -1, -1):
        if entries[index][0] is owner:
            del entries[index:]
            return


@contextmanager
def entered(checkpointer: Checkpointer | None) -> Iterator[None]:
    """Inside, checkpoints are of ``checkpointer``."""
    owner = object()
    push(owner, checkpointer)
    try:
        yield
    finally:
        pop(owner)
