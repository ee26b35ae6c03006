"""Finds the model that a checkpointed call belongs to: the one whose forward runs in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from zero._activations.checkpointer import Checkpointer


class _RunningForwards(threading.local):
    """The forwards that run in this thread, innermost last. Shared by threads, models in two threads would mix."""

    def __init__(self) -> None:
        self.entries: list[tuple[object, Checkpointer | None]] = []


_RUNNING = _RunningForwards()


def current() -> Checkpointer | None:
    """The checkpointer of the innermost forward; None: checkpoints are torch's own."""
    return _RUNNING.entries[-1][1] if _RUNNING.entries else None


def push(owner: object, checkpointer: Checkpointer | None) -> None:
    _RUNNING.entries.append((owner, checkpointer))


def pop(owner: object) -> None:
    # Inner entries go too: an exception that broke off an inner forward may have skipped its pop.
    entries = _RUNNING.entries
    for index in range(len(entries) - 1, -1, -1):
        if entries[index][0] is owner:
            del entries[index:]
            return


@contextmanager
def entered(checkpointer: Checkpointer | None) -> Iterator[None]:
    """Checkpoints inside go to ``checkpointer``."""
    owner = object()
    push(owner, checkpointer)
    try:
        yield
    finally:
        pop(owner)
