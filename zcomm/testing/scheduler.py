"""Runs the threads of all ranks one at a time, in an order that a seed decides, on a virtual clock.

    a task waits: condition and deadline --> the next task: drawn from those whose condition holds
                                             none? the clock moves to the next message or deadline
                                             none of those either? Deadlock, raised in every task

A task is a real thread, because torch keeps its modes by thread; all but one of them block on a lock of their own. They
change places only where one waits, or passes :meth:`Scheduler.pause`. So what runs between two waits is one event, and
a run is a list of them: equal seeds give equal lists.
"""

from __future__ import annotations

import heapq
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32


class Deadlock(BaseException):
    """No task can run, no message is under way and no timeout is pending; or the job does not end."""


class Stopped(BaseException):
    """Raised in the waits of a task whose rank is killed, or whose simulation has ended. Never caught by programs."""


@dataclass(eq=False, slots=True)
class Task:
    """A thread of a rank."""

    rank: int
    name: str
    call: Callable[[], None]
    is_daemon: bool
    """Whether the simulation ends without it."""
    baton: Any = field(default_factory=threading.Lock)
    condition: Callable[[], bool] | None = None
    """It may run once this holds; None: now."""
    deadline: float | None = None
    is_done: bool = False
    ident: int = 0
    """Of its thread."""
    stop: BaseException | None = None
    """Raised in its waits, from now on."""
    interrupt: BaseException | None = None
    """Raised once, in the next wait that a signal ends."""
    is_interruptible: bool = True
    waits_for: str = ""


def _nothing() -> None:
    """The call of a task that has ended."""


class Scheduler:
    """The tasks of one simulation.

    Args:
        seed: Decides who runs next.
        limit_s: A simulation that runs longer than so many virtual seconds is stopped as a deadlock.
        limit_events: One with more events is, too: its ranks go round in a circle.
    """

    def __init__(self, seed: int, *, limit_s: float = 1e5, limit_events: int = 10**6) -> None:
        self.random = random.Random(seed)
        self.now_s, self._limit_s, self._limit_events = 0.0, limit_s, limit_events
        self._tasks: list[Task] = []
        self._stopped: dict[int, float] = {}
        """Ranks that do not run, and until when."""
        self._mains: dict[int, Task] = {}
        self._of_thread = threading.local()
        self._main = threading.Lock()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.digest, self.num_events = 0, 0
        """A checksum of all events so far, and their number."""
        self.trace: list[str] | None = None
        """The events as text, if it is a list."""
        self.at: dict[int, Callable[[], None]] = {}
        """Called once so many events have happened, before the next task is chosen."""

    def spawn(self, rank: int, name: str, call: Callable[[], None], *, is_daemon: bool = False) -> Task:
        """A new task, which runs when it is chosen."""
        task = Task(rank, name, call, is_daemon)
        task.baton.acquire()
        self._tasks.append(task)
        self._mains.setdefault(rank, task)
        threading.Thread(target=self._run, args=(task,), name=f"rank{rank}:{name}", daemon=True).start()
        return task

    def wait(
        self, condition: Callable[[], bool], seconds: float | None = None, what: str = "", *, in_c: bool = False
    ) -> bool:
        """Wait until ``condition()`` holds, ``seconds`` at most; whether it does. Other tasks run meanwhile.

        ``in_c``: as in a call of C++, which a signal does not end; Python raises KeyboardInterrupt after it.
        """
        task = self.current
        task.condition, task.waits_for, task.is_interruptible = condition, what, not in_c
        task.deadline = None if seconds is None else self.now_s + max(seconds, 0.0)
        self._switch(task)
        return condition()

    def pause(self, what: str = "") -> None:
        """A point where another task may run."""
        task = self.current
        task.condition, task.deadline, task.waits_for, task.is_interruptible = None, None, what, True
        self._switch(task)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` in so many virtual seconds. It must not wait."""
        heapq.heappush(self._timers, (self.now_s + seconds, next(self._numbers), call))

    def forget(self) -> None:
        """Drop what the tasks refer to, at the end: finalizers of unclosed objects hold the scheduler."""
        for task in (*self._tasks, *self._mains.values()):
            task.call, task.condition = _nothing, None
            task.stop = task.stop and Stopped()
        self._timers.clear()
        self.at.clear()

    def note(self, event: str) -> None:
        """Record an event: replays of a seed must have the same ones."""
        self.digest, self.num_events = crc32(event.encode(), self.digest), self.num_events + 1
        if self.trace is not None:
            self.trace.append(f"{self.now_s:10.4f} {event}")

    @property
    def current(self) -> Task:
        """The task that runs."""
        task: Task = self._of_thread.task
        return task

    @property
    def is_inside(self) -> bool:
        """Whether the caller is a task."""
        return hasattr(self._of_thread, "task")

    def main_task(self, rank: int) -> Task:
        """The first task of ``rank``."""
        return self._mains[rank]

    def hold(self, rank: int, seconds: float) -> None:
        """Run no task of ``rank`` for so many virtual seconds: as if it was stopped by a signal, or swapped out."""
        self._stopped[rank] = self.now_s + seconds

    def interrupt(self, rank: int) -> None:
        """Raise KeyboardInterrupt in the main task of ``rank``, where it waits."""
        self._mains[rank].interrupt = KeyboardInterrupt()

    def stop_rank(self, rank: int) -> None:
        """Kill the tasks of ``rank``: each ends at its wait. The running one ends at its next."""
        for task in self._tasks:
            if task.rank == rank and not task.is_done:
                task.stop = Stopped(f"rank {rank} is killed")

    def run(self) -> None:
        """Run all tasks until those that are no daemons have ended; then stop the others."""
        self._main.acquire()
        self._pass_on()
        self._main.acquire()
        for task in list(self._tasks):
            if not task.is_done:
                task.stop = Stopped("the simulation has ended")
                task.baton.release()
                self._main.acquire()

    def _run(self, task: Task) -> None:
        task.baton.acquire()
        self._of_thread.task, task.ident = task, threading.get_ident()
        try:
            if task.stop is None:
                task.call()
        except (Stopped, Deadlock):
            pass
        except BaseException:  # as in a thread of a process: printed, and the others go on
            traceback.print_exc()
        task.is_done = True
        self.note(f"rank {task.rank} {task.name} ends")
        if isinstance(task.stop, Stopped) and all(t.is_done or t.is_daemon for t in self._tasks):
            self._main.release()
        else:
            self._pass_on()

    def _switch(self, task: Task) -> None:
        if task.stop is not None:
            raise task.stop
        chosen = self._choose()
        if chosen is not task:
            if chosen is None:
                self._main.release()
            else:
                chosen.baton.release()
            task.baton.acquire()
        if task.stop is not None:
            raise task.stop
        if task.interrupt is not None:
            interrupt, task.interrupt = task.interrupt, None
            raise interrupt

    def _pass_on(self) -> None:
        chosen = self._choose()
        if chosen is None:
            self._main.release()
        else:
            chosen.baton.release()

    def _choose(self) -> Task | None:
        """The task to run next; None: the simulation has ended."""
        while True:
            for number in [number for number in self.at if number <= self.num_events]:
                self.at.pop(number)()
            alive = [task for task in self._tasks if not task.is_done]
            if len(alive) < len(self._tasks):
                self._tasks = alive
            if all(task.is_daemon for task in alive):
                return None
            ready = [task for task in alive if self._is_ready(task)]
            if self.num_events > self._limit_events:
                self._stop(alive, f"no end after {self._limit_events} events")
                self._limit_events = sys.maxsize
            elif ready:
                chosen = ready[self.random.randrange(len(ready))] if len(ready) > 1 else ready[0]
                self.note(f"rank {chosen.rank} {chosen.name} {chosen.waits_for}")
                return chosen
            elif not self._advance(alive):
                self._stop(alive, "nothing can happen any more")

    def _stop(self, alive: list[Task], reason: str) -> None:
        waits = "; ".join(f"rank {task.rank} {task.name} waits for {task.waits_for}" for task in alive)
        for task in alive:
            task.stop = task.stop or Deadlock(f"{reason}: {waits}")

    def _is_ready(self, task: Task) -> bool:
        if task.stop is not None:
            return True
        if self._stopped and self._stopped.get(task.rank, 0.0) > self.now_s:
            return False
        if task.condition is None or (task.interrupt is not None and task.is_interruptible):
            return True
        return task.condition() or (task.deadline is not None and task.deadline <= self.now_s)

    def _advance(self, alive: list[Task]) -> bool:
        """Move the clock to the next message or deadline; whether there is one."""
        held = {rank: until for rank, until in self._stopped.items() if until > self.now_s}
        times = [task.deadline for task in alive if task.deadline is not None and task.rank not in held]
        times += [until for rank, until in held.items() if any(task.rank == rank for task in alive)]
        if self._timers:
            times.append(self._timers[0][0])
        if not times or min(times) > self._limit_s:
            return False
        self.now_s = max(self.now_s, min(times))
        while self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)[2]()
        return True

    def value(self, low: float, high: float) -> float:
        """A number that the seed decides."""
        return self.random.uniform(low, high)


class SimulatedClock:
    """The virtual clock of a simulation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._scheduler.now_s

    def time(self) -> float:
        """Of a calendar that begins in 2001."""
        return 1e9 + self._scheduler.now_s

    def sleep(self, seconds: float, /) -> None:
        """Wait so many virtual seconds."""
        self._scheduler.wait(lambda: False, seconds, "sleep")
