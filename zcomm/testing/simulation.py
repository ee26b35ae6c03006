"""Several ranks in one process: a program runs on each, in an order that a seed decides.

    Simulation(world_size=4, seed=7).run(program) --> what each rank returned, or the error that it raised

``program(rank)`` uses torch.distributed and this library as it would on a real rank over gloo, on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import secrets
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zcomm._base.rank_context import PerRank, RankContext
from zcomm._kernels import kernels
from zcomm.testing.file_queue import simulated_file_queue
from zcomm.testing.network import SimulatedGroup, SimulatedNetwork, SimulatedStore
from zcomm.testing.scheduler import Scheduler, SimulatedClock
from zcomm.testing.threads import threads_of


@dataclass
class Outcome:
    """How one rank ended."""

    result: Any = None
    error: BaseException | None = None
    is_killed: bool = False


class _World(distributed_c10d._World):
    """torch.distributed's groups, as one rank knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Any] = {}
        self.count = 0

    pg_map = property(lambda self: self.tables.setdefault("map", {}))
    pg_names = property(lambda self: self.tables.setdefault("names", {}))
    pg_group_ranks = property(lambda self: self.tables.setdefault("ranks", {}))
    pg_backend_config = property(lambda self: self.tables.setdefault("config", {}))
    group_count = property(lambda self: self.count, lambda self, value: setattr(self, "count", value))


_OF_PROCESS = distributed_c10d._world
_WORLD = PerRank(lambda: _OF_PROCESS)


class _WorldOfRank:
    """In place of torch.distributed's table of groups: that of the rank whose thread asks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_WORLD(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_WORLD(), name, value)


FULL_EVERY = 50
"""Every so many simulations all garbage is collected."""
_NUMBERS = count(1)


def _of(simulation: weakref.ref[Simulation]) -> Simulation:
    found = simulation()
    assert found is not None, "a function of torch.distributed as it was in a simulation that has ended"
    return found


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames of ``error``: a loss would keep its graph, hooks, model and optimizer."""
    todo, seen = [error], set[int]()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Within the block this thread, and those that it starts, stay on the core on which it runs now.

    Only one of them runs at a time, and waking one on another core takes longer: simulations took 1.5 times as long.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed, libc = os.sched_getaffinity(0), ctypes.CDLL(None)
    with suppress(OSError, AttributeError):  # this process has just lost that core, or its C library does not tell
        os.sched_setaffinity(0, {libc.sched_getcpu()} & allowed or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Simulation:
    """Ranks of one job.

    Args:
        world_size: Their number.
        seed: Decides the order in which they run, and how long messages take. Equal seeds give equal runs.
        timeout_s: Of process groups and the store, in virtual seconds.
        limit_s: A job that runs longer, in virtual seconds, is stopped as a deadlock.
        limit_events: So is one with more events.
        after: An earlier start of the same job, whose store is still there: as torchrun's agent keeps it.
    """

    def __init__(
        self,
        world_size: int,
        seed: int = 0,
        *,
        timeout_s: float = 1800.0,
        limit_s: float = 1e5,
        limit_events: int = 10**6,
        after: Simulation | None = None,
    ) -> None:
        self.world_size, self._timeout_s = world_size, timeout_s
        self.scheduler = Scheduler(seed, limit_s=limit_s, limit_events=limit_events)
        self.network = SimulatedNetwork(self.scheduler)
        self._num_starts: int = 1 if after is None else after._num_starts + 1
        self._tokens = random.Random(f"tokens of start {self._num_starts} of {seed}")
        if after is not None:
            self.network.values = after.network.values
        self.files_fail_after: dict[int, int] = {}
        """By rank: after so many events it can neither create nor write files of offloaded values."""
        self._outcomes = [Outcome() for _ in range(world_size)]

    def kill(self, rank: int) -> None:
        """End ``rank`` where it waits, as the loss of its process would; its peers see closed connections."""
        self._outcomes[rank].is_killed = True
        self.scheduler.stop_rank(rank)
        self.network.close_rank(rank)

    def stop(self, rank: int, seconds: float) -> None:
        """Let ``rank`` do nothing for so many virtual seconds; its connections stay."""
        self.scheduler.hold(rank, seconds)

    def interrupt(self, rank: int) -> None:
        """Raise KeyboardInterrupt in the main thread of ``rank`` where it waits; in gloo's waits, after them."""
        self.scheduler.interrupt(rank)

    def run(self, program: Callable[[int], object]) -> list[Outcome]:
        """Run ``program(rank)`` on every rank to its end; what each returned or raised. Raises nothing itself."""
        threads, clock = threads_of(self.scheduler), SimulatedClock(self.scheduler)
        with self._installed(), _on_one_core():
            for rank in range(self.world_size):
                self.scheduler.spawn(rank, "main", partial(self._main, rank, RankContext(clock, threads), program))
            self.scheduler.run()
        self.scheduler.forget()
        for outcome in self._outcomes:
            _forget_frames(outcome.error)
        return self._outcomes

    def _main(self, rank: int, context: RankContext, program: Callable[[int], object]) -> None:
        outcome = self._outcomes[rank]
        with context.inside():
            context.values[_WORLD] = _World()
            self._register("default", list(range(self.world_size)), rank, is_default=True)
            try:
                outcome.result = program(rank)
            except BaseException as error:
                outcome.error = error

    def _register(self, name: str, ranks: list[int], rank: int, *, is_default: bool = False) -> SimulatedGroup:
        world: Any = _WORLD()
        group = SimulatedGroup(self.network, name, ranks, rank, self._timeout_s)
        store = SimulatedStore(self.network, self._timeout_s)
        world.pg_map[group], world.pg_names[group] = ("gloo", store), name
        world.pg_group_ranks[group] = {of_job: number for number, of_job in enumerate(ranks)}
        world.pg_backend_config[group] = "gloo"
        if is_default:
            world.default_pg = group
        return group

    def _new_group(
        self, ranks: list[int] | None = None, timeout: timedelta | None = None, backend: Any = None, **options: Any
    ) -> Any:
        del timeout, backend
        world, rank = _WORLD(), dist.get_rank()
        members = sorted(range(self.world_size) if ranks is None else ranks)
        if options.get("use_local_synchronization"):
            name = f"local {members} {len(world.pg_names)}"
        else:
            world.group_count += 1
            name = f"group {world.group_count}"
        if rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        self.network.connect(name, members, rank, self._timeout_s)
        return self._register(name, members, rank)

    def _destroy(self, group: Any = None) -> None:
        world = _WORLD()
        for one in [group] if group is not None else list(world.pg_map):
            self.network.close_group(one.group_name, dist.get_rank(), "Connection closed by peer")
            for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
                table.pop(one, None)
        if group is None:
            world.default_pg = None

    @contextmanager
    def _installed(self) -> Iterator[None]:
        # Not this object: torch.compile keeps every function of torch.distributed that it has seen.
        own = weakref.ref(self)
        replaced: list[tuple[Any, str, Any]] = [
            (dist, "new_group", lambda *args, **options: _of(own)._new_group(*args, **options)),
            (dist, "destroy_process_group", lambda group=None: _of(own)._destroy(group)),
            (secrets, "token_hex", lambda nbytes: self._tokens.randbytes(nbytes).hex()),
            (kernels, "file_queue", partial(simulated_file_queue, self.scheduler, self.files_fail_after)),
        ]
        before = [getattr(where, name) for where, name, _ in replaced]
        collects = gc.isenabled()
        gc.disable()  # finalizers would run at places that differ between replays
        distributed_c10d._world = _WorldOfRank()  # type: ignore[assignment]
        for where, name, function in replaced:
            setattr(where, name, function)
        try:
            yield
        finally:
            for (where, name, _), function in zip(replaced, before, strict=True):
                setattr(where, name, function)
            distributed_c10d._world = _OF_PROCESS
            # All that the run has made is in the youngest generation, unless the library has collected meanwhile.
            gc.collect(0 if next(_NUMBERS) % FULL_EVERY else 2)
            if collects:
                gc.enable()
