"""Daemon threads that end before the interpreter does.

A daemon thread that is inside torch's C++ code while the interpreter is torn down aborts the process ("terminate
called without an active exception"): it may not take the interpreter's lock any more, and C++ does not let a thread end
there. So at exit each thread here is told to end, and gets END_S seconds for what it is doing.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from zcomm._base.rank_context import PerRank, bound, clock, threads

END_S = 5.0
"""For all threads together. One may wait for a rank that never answers."""

_THREADS = PerRank(list[tuple[threading.Thread, Callable[[], object]]])
_LOCK = threading.Lock()


def start_daemon(target: Callable[[], None], name: str, end: Callable[[], object] = int) -> threading.Thread:
    """Start a daemon thread that runs ``target``; ``end``, called at exit, makes it return once it is idle."""
    thread, started = threads().Thread(target=bound(target), name=name, daemon=True), _THREADS()
    with _LOCK:
        started[:] = [known for known in started if known[0].is_alive()]
        thread.start()
        started.append((thread, end))
    return thread


@atexit.register
def end_daemons() -> None:
    """Tell this rank's threads to end, and wait for them, :data:`END_S` at most."""
    stop, running = clock().monotonic() + END_S, list(_THREADS())
    for _, end in running:
        with suppress(Exception):
            end()
    for thread, _ in running:
        thread.join(max(stop - clock().monotonic(), 0.0))


class DaemonThread:
    """A daemon thread that runs callables in order, started at the first one. They must not raise."""

    def __init__(self, name: str) -> None:
        self._name, self._lock, self._is_running = name, threading.Lock(), False
        self._calls: SimpleQueue[Callable[[], None] | None] = threads().SimpleQueue()

    def run(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls.put(call)
            if not self._is_running:  # also after its end: an exit handler of the program may call collectives
                self._is_running = True
                start_daemon(self._serve, self._name, self.end)

    def end(self) -> None:
        """End once everything has been run."""
        self._calls.put(None)

    def _serve(self) -> None:
        is_ending = False
        while True:
            if is_ending:
                with self._lock:
                    if self._calls.empty():
                        self._is_running = False
                        return
            call = self._calls.get()
            if call is None:
                is_ending = True
            else:
                call()
            del call  # it holds tensors
