"""Daemon threads that end before the interpreter does.

A daemon thread that is inside torch's C++ code while the interpreter is torn down aborts the process ("terminate
called without an active exception"): it may not take the interpreter's lock any more, and C++ does not let a thread end
there. So at exit each thread here is told to end, and gets END_S seconds for what it is doing.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

END_S = 5.0
"""For all threads together. One may wait for a rank that never answers."""

_THREADS: list[tuple[threading.Thread, Callable[[], object]]] = []
_LOCK = threading.Lock()


def start_daemon(target: Callable[[], None], name: str, end: Callable[[], object] = int) -> threading.Thread:
    """Start a daemon thread that runs ``target``; ``end``, called at exit, makes it return once it is idle."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _LOCK:
        _THREADS[:] = [known for known in _THREADS if known[0].is_alive()]
        thread.start()
        _THREADS.append((thread, end))
    return thread


@atexit.register
def _end_all() -> None:
    stop = time.monotonic() + END_S
    for _, end in _THREADS:
        end()
    for thread, _ in _THREADS:
        thread.join(max(stop - time.monotonic(), 0.0))
