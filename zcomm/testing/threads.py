"""Threads, events, locks, queues and executors of a simulated rank: what blocks, waits in the scheduler."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

from zcomm._base.rank_context import Threads, bound
from zcomm.testing.scheduler import Scheduler, Stopped, Task


def threads_of(scheduler: Scheduler) -> type[Threads]:
    """The threads of the simulation: the same interface as that of a process."""
    own: dict[str, Any] = {name: type(name, (cls,), {"scheduler": scheduler}) for name, cls in SIMULATED.items()}
    own["main_thread"] = staticmethod(lambda: MainThread(scheduler))
    own["waiting_files"] = frozenset({__file__})
    own["hidden_files"] = frozenset(str(Path(__file__).with_name(name)) for name in ("scheduler.py", "network.py"))
    return type("SimulatedThreads", (Threads,), own)


class MainThread:
    """The main thread of the rank that asks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._task = scheduler.main_task(scheduler.current.rank)
        self.ident = self._task.ident

    def is_alive(self) -> bool:
        return not self._task.is_done


class SimulatedEvent:
    """As threading.Event."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._is_set or self.scheduler.wait(self.is_set, timeout, "an event")


class SimulatedRLock:
    """As threading.RLock."""

    scheduler: Scheduler
    is_reentrant = True

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self.scheduler.current
        if self._owner is not None and not (self.is_reentrant and self._owner is task):
            seconds = 0.0 if not blocking else None if timeout < 0 else timeout
            if not self.scheduler.wait(lambda: self._owner is None, seconds, "a lock"):
                return False
        self._owner, self._depth = task, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedLock(SimulatedRLock):
    """As threading.Lock."""

    is_reentrant = False


class SimulatedQueue:
    """As queue.SimpleQueue."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        if not self._items:
            self.scheduler.wait(lambda: bool(self._items), None, "a queue")
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class SimulatedThread:
    """As threading.Thread, of the rank that makes it."""

    scheduler: Scheduler

    def __init__(
        self, target: Callable[..., object], name: str = "", args: tuple[Any, ...] = (), *, daemon: bool = False
    ) -> None:
        self._target, self.name, self.daemon = bound(partial(target, *args)), name, daemon
        self._task: Task | None = None
        self.ident: int | None = None

    def start(self) -> None:
        self._task = self.scheduler.spawn(self.scheduler.current.rank, self.name, self._run, is_daemon=self.daemon)

    def _run(self) -> None:
        self.ident = threading.get_ident()
        self._target()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self.scheduler.wait(lambda: not self.is_alive(), timeout, f"the end of {self.name}")


class SimulatedFuture:
    """As concurrent.futures.Future."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_done, self._result = False, None
        self._error: BaseException | None = None

    def run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except Stopped:
            raise
        except BaseException as error:
            self._error = error
        self._is_done = True

    def done(self) -> bool:
        return self._is_done

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._is_done and not self._scheduler.wait(self.done, timeout, "a future"):
            raise TimeoutError
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._result


class SimulatedExecutor:
    """As ThreadPoolExecutor(1)."""

    scheduler: Scheduler

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "executor") -> None:  # noqa: ARG002
        self._name, self._is_running = thread_name_prefix, False
        self._calls: deque[Callable[[], None]] = deque()

    def submit(self, call: Callable[..., Any], *args: Any) -> SimulatedFuture:
        future = SimulatedFuture(self.scheduler)
        self._calls.append(bound(lambda: future.run(lambda: call(*args))))
        if not self._is_running:
            self._is_running = True
            self.scheduler.spawn(self.scheduler.current.rank, self._name, self._serve)
        self.scheduler.pause("submit")  # the thread may be faster than the one that submits
        return future

    def _serve(self) -> None:
        while self._calls:
            self._calls.popleft()()
        self._is_running = False

    def shutdown(self, wait: bool = True) -> None:
        if wait and self._is_running:
            self.scheduler.wait(lambda: not self._is_running, None, f"the end of {self._name}")


SIMULATED = {
    "Thread": SimulatedThread,
    "Event": SimulatedEvent,
    "Lock": SimulatedLock,
    "RLock": SimulatedRLock,
    "SimpleQueue": SimulatedQueue,
    "Executor": SimulatedExecutor,
}
