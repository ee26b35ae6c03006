"""The deadlock watch: finds ranks that wait for each other in different calls, and raises DivergedError on all.

A thread samples this rank twice a second. While the rank makes progress, the thread does nothing else. A rank whose
state is the same in two samples reports to torch.distributed's store what it has started and what it waits for:

    every rank waits, and every exchange waited for lacks a rank    a deadlock: rank 0 publishes the verdict
    every rank has read the verdict                                 waits will end with DivergedError
    every rank's watch thread starts the missing exchanges          all waits end

So the process groups stay usable. One watch serves all topologies of the same ranks.

A rank that computes or sleeps is a straggler, not a deadlock, however long it takes. A rank also counts as waiting if
its main thread has ended, or is in one call of torch.distributed (such as a barrier) or in one store exchange. This
holds only if the topology has all ranks of torch.distributed; otherwise that call may be among other ranks, which can
complete it.

Invariants:
    D1  A report is a consistent state of a rank at one moment at which it waited. So reports prove a deadlock even if
        they are of different moments: the first rank to make progress would need another to have done so before.
        That does not hold for calls that are not logged here, such as a barrier: the others may have done their part of
        it before they reported. So such a report says only that the rank looked the same in two samples, and is
        repeated. With one among them all reports must stay the same for ZCOMM_DIVERGED_AFTER_S seconds, and be repeated
        at the end of them.
    D2  A rank continues only after all its missing exchanges have been started. Only then does its next exchange have
        the same number on every rank. A rank that was in none of them, but in a barrier or in the store, starts none
        before: those that waited may get there first, and release it (test_simulation.py).
    D3  A hop of a closed topology is watched until every rank has closed it, if other topologies keep its process
        group: no connection is closed then that would end the waits of the others.
    D4  A topology is closed only after what its rank has started for others is complete: with ZCOMM_CHECK=1 that sends
        checksums and verdicts later, without which ranks that are still to wake up would wait for the timeout.
    D5  A rank may report that it waits, then make progress and close the topology before its next sample. So a wait is
        no proof if the rank has left the topology since, or another one has, and no longer reports the hop: all have
        closed it, or the connections are closed, which ends the wait.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from zcomm._base import env
from zcomm._base.daemon_threads import start_daemon
from zcomm._base.pending import Pending
from zcomm._base.rank_context import PerRank, clock, threads
from zcomm._transport import backend, call_context, stacks
from zcomm._transport.backend import ALONE, Hop
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog
from zcomm._transport.deadlock_analysis import (
    Hops,
    MissingCalls,
    RankProgress,
    missing_calls_of,
    ranks_behind,
    will_end,
)
from zcomm._transport.nccl_communicators import IN_ROUTE, Communicators
from zcomm._transport.stacks import StackFrame
from zcomm._transport.store_exchange import prefix_of_start
from zcomm._transport.tagged import tag_of
from zcomm._transport.tagged_group import Group, TaggedGroup, is_open, ranks_of
from zcomm._transport.work import WorkQueue
from zcomm.errors import DivergedError


class Watchable(Protocol):
    """What the watch needs of a :class:`zcomm.Topology`."""

    world: Hop
    intra: Hop
    inter: Hop
    queue: WorkQueue
    rank: int

    @property
    def global_ranks(self) -> tuple[int, ...]: ...


class Watched(NamedTuple):
    """A log to watch: of a hop, or of a stream of a communicator over NCCL."""

    kind: str
    log: CollectiveLog
    global_ranks: Sequence[int]
    is_tagged: bool
    """Whether exchanges of different calls never match: they wait, and cannot mix up bytes."""
    hop: Hop = ALONE
    """ALONE: a communicator's stream, whose waits ``abort`` ends."""
    paired: Hop = ALONE
    """The other hop of a two-hop collective, if there is one."""
    abort: Callable[[str], None] | None = None
    is_closed: bool = False
    """Whether this rank has closed the topology, and will start no more over the hop."""


def abort_diverged_routes(watched: Mapping[str, Watched], missing: Mapping[str, MissingCalls], reason: str) -> None:
    """Abort the communicators of routes on which the ranks have queued different calls: on all ranks of each route.

    A kernel of NCCL that waits for another rank cannot be completed from outside, and would hold the GPU.
    """
    routes = {name.partition(IN_ROUTE)[0] for name, of_hop in missing.items() if of_hop.calls}
    for name, one in watched.items():
        if one.abort is not None and name.partition(IN_ROUTE)[0] in routes:
            one.abort(reason)


def start_missing(watched: Watched, missing: MissingCalls) -> list[Pending]:
    """Start this rank's missing exchanges over one hop; its log then has the same number as those of all ranks."""
    hop, log, works = watched.hop, watched.log, []
    num_started, _, recent, _ = log.snapshot()
    mine = {num_started - back: call for back, call in enumerate(reversed(recent))}
    for number, call in missing.calls:
        own = mine.get(number)
        is_tagged = hop.is_tagged(call.device_type)
        is_mine = own is not None and (not is_tagged or tag_of(number, own) == tag_of(number, call))
        while log.num_started < number:
            log.start(call, is_missing=True)
        if not is_mine and watched.abort is None:
            over = hop.paired_with(watched.paired) if call.pair_number else hop
            works.append(backend.start_for_others(number, call, over))
    log.num_pairs = max(log.num_pairs, missing.num_pairs)
    return works


def watched_of(topology: Watchable) -> Iterator[tuple[str, Watched]]:
    """The hops and NCCL streams of ``topology``, by a name that is the same on all ranks of each."""
    for watched in hops_of(topology):
        yield _name_of(watched.hop), watched
    communicators: Communicators | None = topology.world.communicators
    for stream in () if communicators is None else communicators.streams(name_of(topology)):
        yield stream.name, Watched(stream.name, stream.queued.log, stream.queued.ranks, True, abort=stream.abort)


def skip(topology: Watchable, numbers: Mapping[str, int]) -> None:
    """Advance streams on which this rank has queued nothing to ``numbers``, by name, so that later numbers match."""
    communicators: Communicators | None = topology.world.communicators
    if communicators is not None:
        communicators.skip(name_of(topology), numbers)


def hops_of(topology: Watchable) -> Iterator[Watched]:
    """The hops of ``topology`` that have several ranks."""
    t, seen = topology, set[int]()
    # Hops on the host and of the background thread are made at their first use.
    host, background = vars(t).get("on_host", ALONE), getattr(vars(t).get("background"), "hop", ALONE)
    pairs = (("", t.world, ALONE), ("intra", t.intra, t.inter), ("inter", t.inter, t.intra))
    for kind, hop, paired in (*pairs, ("host", host, ALONE), ("background", background, ALONE)):
        if hop.group is not None and id(hop.log) not in seen and is_open(hop.group):
            seen.add(id(hop.log))
            ranks = ranks_of(hop.group)
            yield Watched(f"{name_of(t)}.{kind}", hop.log, ranks, hop.is_tagged("cpu"), hop, paired)


def name_of(topology: Watchable) -> str:
    return _name_of(topology.world)


def _name_of(hop: Hop) -> str:
    """The name of the group: the same on all its ranks."""
    return "" if hop.group is None else str(hop.group.group_name)


logger = logging.getLogger("zcomm")

PERIOD_S = 0.5
NUM_TRIED = 3  # failures in a row before a rank stops watching
VERDICT_S = 20 * PERIOD_S  # at most, to carry out a verdict: every rank's next sample comes after 4 periods at most
ANSWER_S = 3.0  # the store's time to answer once an exchange has failed


class DeadlockWatch:
    """Watches the exchanges of rank ``rank`` over all topologies of ``global_ranks``."""

    def __init__(self, global_ranks: tuple[int, ...], rank: int, group: Group) -> None:
        self._rank, self._world_size = rank, len(global_ranks)
        self._number = {of_job: index for index, of_job in enumerate(global_ranks)}
        self._has_all_ranks = len(global_ranks) == dist.get_world_size()
        self._topologies: tuple[weakref.ref[Watchable], ...] = ()
        self._closed: dict[str, dict[str, Watched]] = {}
        """Hops of topologies that this rank has closed, by name of the topology and of the hop (D3)."""
        self._lock = threads().Lock()
        self._end = threads().Event()
        self.compose: Callable[[Sequence[str]], str] = _compose
        """Makes the error text from what each rank does, if all have noted it (:func:`call_context.note_activity`)."""
        self.period_s = PERIOD_S
        """Seconds between two samples; up to four times as many while nothing changes for long."""
        self.store: Any = dist.distributed_c10d._get_default_store()
        # A connection of its own: the main thread may block in a request on the other one, which locks it.
        self._store = self.store.clone() if hasattr(self.store, "clone") else self.store
        name = f"zcomm/watch/{hashlib.sha256(json.dumps(global_ranks).encode()).hexdigest()[:16]}"
        timeout = backend.timeout_of(group)
        self._prefix = prefix_of_start(self._store, name, global_ranks, global_ranks[rank], timeout)
        self.num_deadlocks = 0
        """The number of deadlocks found."""
        self._num_heard = 0
        """The number of those that this rank has told the others to have read."""
        self._last_sample: str | None = None
        """The state at the last sample, if the rank waited."""
        self.has_reported = False
        """Whether this rank has waited for two samples and reported that."""
        self._has_ended_verdict = threads().Event()
        """Cleared while exchanges that this rank has started for others are not complete (D4)."""
        self._has_ended_verdict.set()
        self._store_answers = True  # until a request times out
        self._stacks: dict[int, list[StackFrame]] = {}
        """The stacks, at the last sample, of threads in a call that is not logged."""
        self._num_reports = 0
        self._unproven: tuple[str, float, list[int]] | None = None
        """Reports of all ranks that make a deadlock if they last, since when, and how often the ranks had repeated them
        towards the end of ZCOMM_DIVERGED_AFTER_S seconds (D1)."""

    def add(self, topology: Watchable) -> None:
        """Also watch ``topology``, until it is closed or collected."""
        for watched in hops_of(topology):
            watched.log.departed = partial(self.departed, name_of(topology))
        with self._lock:
            is_first = not self._topologies
            self._topologies = (*self._alive(), weakref.ref(topology))
            if is_first:
                self._end = threads().Event()
                # A weak reference: the thread must not keep the watch, and its store, alive.
                start_daemon(partial(_serve, weakref.ref(self), self._end), "zcomm-watch", self._end.set)

    def remove(self, topology: Watchable, ended: Sequence[dist.ProcessGroup] = ()) -> None:
        """Stop watching ``topology``, which is being closed, and publish that. The last one ends the thread.

        Args:
            topology: One that was added.
            ended: The shared process groups that are destroyed with it: no other topology of this rank uses them.
        """
        self._has_ended_verdict.wait(VERDICT_S)
        name = name_of(topology)
        self._leave(topology, stacks.describe(threading.get_ident(), "has closed its Topology"))
        with self._lock:
            self._closed[name] = {key: _closed(watched) for key, watched in watched_of(topology)}
            self._forget_closed(ended)
            self._topologies = tuple(one for one in self._alive() if one() is not topology)
            if not self._topologies:
                self._end.set()

    def end(self) -> None:
        """Publish that this process ends, for ranks that will still wait for it."""
        self._has_ended_verdict.wait(VERDICT_S)
        for one in self._alive():
            if (topology := one()) is not None:
                self._leave(topology, "has ended")

    def _leave(self, topology: Watchable, text: str) -> None:
        if self._store_answers:
            with suppress(Exception):  # the store, and with it the job, may have ended
                self._store.set(f"{self._prefix}/left/{name_of(topology)}/{self._rank}", text)

    def _forget_closed(self, ended: Sequence[dist.ProcessGroup] = ()) -> None:
        """Stop watching hops of closed topologies whose group is destroyed, or which all ranks have closed."""
        self._closed = {
            name: kept
            for name, hops in self._closed.items()
            if (kept := {key: watched for key, watched in hops.items() if _is_shared(watched.hop, ended)})
            and not self._is_closed_by_all(name)
        }

    def _is_closed_by_all(self, name: str) -> bool:
        keys = [f"{self._prefix}/left/{name}/{rank}" for rank in range(self._world_size)]
        with suppress(Exception):  # as in _leave
            return not self._store_answers or bool(self._store.check(keys))
        return True

    def departed(self, name: str) -> str:
        """Describes ranks that have left the topology whose group is called ``name``; empty: none is known."""
        left = self._departed_texts(name)
        with suppress(Exception):
            context = call_context.current_context()
            doing = context.call or context.within or "is in forward or backward"
            mine = stacks.describe(threading.get_ident(), doing)
            return f"{DEADLOCK}{'; '.join([*left, f'rank {self._rank}: {mine}'])}" if left else ""
        return ""

    def _departed_texts(self, name: str) -> list[str]:
        """What ranks published when they left. A thread asks: if the network is cut, the store never answers."""
        keys, found = {rank: f"{self._prefix}/left/{name}/{rank}" for rank in range(self._world_size)}, list[str]()

        def ask() -> None:
            with suppress(Exception):
                there = [rank for rank, key in keys.items() if self._store.check([key])]
                found.extend(f"rank {rank}: {self._store.get(keys[rank]).decode()}" for rank in there)

        if self._store_answers:
            with suppress(RuntimeError):  # no thread can be started: the interpreter is shutting down
                asking = start_daemon(ask, "zcomm-left")
                asking.join(ANSWER_S)
                self._store_answers = not asking.is_alive()
        return found if self._store_answers else []

    def _alive(self) -> tuple[weakref.ref[Watchable], ...]:
        return tuple(one for one in self._topologies if one() is not None)

    def sample(self) -> bool:
        """If nothing has changed since the last sample: report, decide (rank 0), and follow a verdict.

        Returns:
            False if no topology is left.
        """
        hops = {key: w for one in self._topologies if (t := one()) is not None for key, w in watched_of(t)}
        if self._closed:
            with self._lock:
                self._forget_closed()
        hops |= {key: watched for of_closed in self._closed.values() for key, watched in of_closed.items()}
        report = self._progress(hops)
        is_logged = not self._stacks
        seen = None if report is None else json.dumps([is_logged, *report[1:]])
        if seen is None or seen != self._last_sample:
            self._last_sample, self._unproven = seen, None
            if self.has_reported:
                self.has_reported = False
                self._store.add(self._key("waiting"), -1)
            return bool(self._alive())
        if not (self.has_reported and is_logged):
            self._num_reports += 1
            self._store.set(
                self._key(self._rank), json.dumps(self._report(report, 0 if is_logged else self._num_reports))
            )
        if not self.has_reported:
            self._store.add(self._key("waiting"), 1)
            self.has_reported = True
        if self._rank == 0 and self._store.add(self._key("waiting"), 0) == self._world_size:
            self._decide()
        else:
            self._unproven = None
        if self._store.check([self._key("verdict")]):
            reason, missing = json.loads(self._store.get(self._key("verdict")))
            self._has_ended_verdict.clear()
            try:
                self._break_deadlock(reason, missing, hops)
            finally:
                self._has_ended_verdict.set()
        return True

    def _key(self, what: object) -> str:
        return f"{self._prefix}/{self.num_deadlocks}/{what}"

    def _progress(self, hops: dict[str, Watched]) -> tuple[int | str, dict[str, RankProgress]] | None:
        """The waiting thread, or what the rank is blocked in, and the progress of all hops; None: not blocked."""
        queues = [t.queue for one in self._topologies if (t := one()) is not None]
        drivers = {queue.thread_id for queue in queues}
        waiting = {thread for queue in queues for thread in list(queue.waits)}
        progresses, callers = {}, set[int]()
        for key, (kind, log, of_job, sends, *_, is_closed) in hops.items():
            num_started, waits, recent, num_pairs = log.snapshot()
            waiting |= set(waits)
            callers |= set() if is_closed else log.callers()
            ranks = [self._number[rank] for rank in of_job]
            broken, awaited = log.last_broken, sorted(waits.values())
            progresses[key] = RankProgress(ranks, kind, sends, num_started, broken, awaited, recent, num_pairs)
        if any(queue.waits and queue.thread_id not in waiting for queue in queues):
            return None  # the queue's thread computes, and will start the next exchange
        main = threads().main_thread().ident or 0
        own = waiting - drivers
        others = (callers | {main}) - waiting - drivers - {threading.get_ident()}
        blocked = self._blocked(others, own)
        if blocked is None:
            return None
        doing: int | str = (main if main in own else min(own)) if own else blocked
        return doing, progresses

    def _blocked(self, others: set[int], waiting: set[int]) -> str | None:
        """What the main thread is blocked in outside of exchanges; None while one of ``others`` may make progress."""
        stack_of, main, found = stacks.stacks_of(others), threads().main_thread(), ""
        before, self._stacks = self._stacks, {}
        for thread in others:
            stack = stack_of.get(thread)
            if thread == main.ident and not main.is_alive():
                found = "has left: its program has ended"
            elif stack is not None:  # a thread without a Python stack is idle in C++
                where = self._blocked_at(stack, waiting)
                if not where:
                    return None
                if where != IDLE:
                    self._stacks[thread] = stack
                found = where if thread == main.ident else found
        if any(before.get(thread) != stack for thread, stack in self._stacks.items()):
            return None
        return found if waiting or found not in ("", IDLE) else None

    def _blocked_at(self, stack: list[StackFrame], waiting: set[int]) -> str:
        """The call in which the thread of ``stack`` may be blocked; empty: it computes."""
        name, function = stack[0].file, stack[0].function
        if name.endswith("concurrent/futures/thread.py") and function == "_worker":
            return IDLE
        if function == "_engine_run_backward":  # the main thread waits for a thread of autograd, which may be blocked
            ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
            return IDLE if waiting - ours else ""
        if waiting and name in threads().waiting_files:
            return "waits for another thread"
        return stacks.is_blocked_in(stack) if self._has_all_ranks else ""

    def _report(self, report: tuple[int | str, dict[str, RankProgress]] | None, number: int) -> list[Any]:
        """The JSON of a report: whether there is a note of what the rank does, a description, ``number``, the progress.

        ``number``: 0 if the report relies on logged calls alone, else how often this rank has reported.
        """
        assert report is not None, "a rank that makes progress does not report"
        doing, progresses = report
        if isinstance(doing, str):
            return [False, doing, number, progresses]
        noted = call_context.noted_activity(doing)
        text = stacks.describe(doing, self._call_of(doing))
        return [bool(noted), f"{noted} ({text})" if noted else text, number, progresses]

    def _call_of(self, thread: int) -> str:
        for log in [w.log for one in self._topologies if (t := one()) is not None for _, w in watched_of(t)]:
            number = log.snapshot()[1].get(thread)
            if number is not None:
                return log.call_name(number, "backward: " if stacks.is_in_backward(thread) else "")
        return "a collective"

    def _decide(self) -> None:
        reports = [json.loads(self._store.get(self._key(rank))) for rank in range(self._world_size)]
        world = [{key: RankProgress.from_json(one) for key, one in of_rank.items()} for *_, of_rank in reports]
        waits = [(rank, key, one) for rank, hops in enumerate(world) for key, one in hops.items() if one.waits]
        if not waits or will_end(world) or any(self._is_over(world, *one) for one in waits):
            self._unproven = None
            return
        if not self._have_lasted(reports):
            return
        compose = self.compose if all(has_noted for has_noted, *_ in reports) else _compose
        reason = compose([text for _, text, *_ in reports]) + ranks_behind(world) + self._closed_alone(world)
        self._store.set(self._key("verdict"), json.dumps([reason, missing_calls_of(world)]))

    def _have_lasted(self, reports: Sequence[list[Any]]) -> bool:
        """Whether the reports of all ranks prove what they say (D1)."""
        numbers = [number for _, _, number, _ in reports if number]
        if not numbers:
            return True
        of_ranks = [[text, number > 0, progress] for _, text, number, progress in reports]
        what, now = json.dumps(of_ranks), clock().monotonic()
        if self._unproven is None or self._unproven[0] != what:
            self._unproven = what, now, []
        (_, since, late), left_s = self._unproven, float(env.value("ZCOMM_DIVERGED_AFTER_S"))
        left_s -= now - since
        if not late and left_s <= 4 * self.period_s:  # the longest time between two samples of a rank
            self._unproven = what, since, numbers
        return left_s <= 0 and bool(late) and all(number > then for number, then in zip(numbers, late, strict=True))

    def _is_over(self, world: Sequence[Hops], rank: int, key: str, progress: RankProgress) -> bool:
        """Whether a wait that ``rank`` has reported has ended since, or ends without a verdict (D5)."""
        if not progress.is_tagged or key == progress.kind:  # a stream of NCCL, whose waits a verdict alone ends
            return False
        name = progress.kind.rpartition(".")[0]
        gone = [other for other in progress.ranks if other == rank or key not in world[other]]
        return any(self._store.check([f"{self._prefix}/left/{name}/{other}"]) for other in gone)

    def _closed_alone(self, world: Sequence[Mapping[str, RankProgress]]) -> str:
        """A line for each rank that has closed a topology in which others wait."""
        waited = {progress.kind.rpartition(".")[0] for hops in world for progress in hops.values() if progress.waits}
        lines = {f"\n  {text}" for name in sorted(waited) for text in self._departed_texts(name)}
        return "".join(sorted(lines))

    def _await_all_hear(self) -> None:
        """Wait until all ranks have marked their logs: one that is woken earlier would use the dummy values.

        Raises TimeoutError if they have not after VERDICT_S: one has died. The next sample tries again.
        """
        if self._num_heard == self.num_deadlocks:
            self._num_heard += 1
            self._store.add(self._key("heard"), 1)
        deadline = clock().monotonic() + VERDICT_S
        while self._store.add(self._key("heard"), 0) < self._world_size:
            if clock().monotonic() > deadline:
                raise TimeoutError(f"not all ranks have read that there is a deadlock, after {VERDICT_S} s")
            clock().sleep(0.02)

    def _break_deadlock(self, reason: str, missing: dict[str, list[Any]], hops: dict[str, Watched]) -> None:
        known = {
            key: MissingCalls(until, [(number, CollectiveCall(*call)) for number, call in calls], num_pairs)
            for key, (until, calls, num_pairs) in missing.items()
        }
        for key, watched in hops.items():
            if key in known:
                watched.log.mark_broken(known[key].until, reason)
        topologies = [topology for one in self._topologies if (topology := one()) is not None]
        # Now: once all have heard, a rank that was in none of the exchanges may be released, and queue new ones.
        queued = [work for topology in topologies for work in topology.queue.take_all()]
        try:
            self._await_all_hear()
            abort_diverged_routes(hops, known, reason)
            works = [work for key, one in hops.items() if key in known for work in start_missing(one, known[key])]
            for topology in topologies:
                skip(topology, {key: known[key].until for key in known.keys() - hops.keys()})
        finally:
            # After start_missing: D2. If a rank or the store has died: what waits here must get its error all the same.
            for collective in queued:
                collective.cancel(DivergedError(reason))
            for watched in hops.values():
                watched.log.missing_started.set()
        self.num_deadlocks, self._last_sample, self.has_reported = self.num_deadlocks + 1, None, False
        for work in works:
            work.wait()


def _closed(watched: Watched) -> Watched:
    """``watched`` with copies of its hops, which keep their groups when the topology is closed."""
    return watched._replace(hop=replace(watched.hop), paired=replace(watched.paired), is_closed=True)


def _is_shared(hop: Hop, ended: Sequence[dist.ProcessGroup]) -> bool:
    return isinstance(hop.group, TaggedGroup) and is_open(hop.group) and hop.group.group not in ended


DEADLOCK = "deadlock: the ranks make different calls: "
IDLE = "is idle"


def _compose(texts: Sequence[str]) -> str:
    return DEADLOCK + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _serve(reference: weakref.ref[DeadlockWatch], end: threading.Event) -> None:
    period_s, num_failed = 0.0, 0
    while not end.wait(period_s):
        if (watch := reference()) is None:
            return
        try:
            if not watch.sample():
                del watch
                continue
            num_failed = 0
        except Exception as error:  # a slow store fails once or twice; always: it has ended, and with it the job
            if (num_failed := num_failed + 1) == NUM_TRIED:
                logger.debug("the deadlock watch has stopped: %s", error)
                return
        period_s = min(1.2 * period_s, 4 * watch.period_s) if watch.has_reported else watch.period_s
        del watch  # or the thread would keep it alive while it sleeps


_CURRENT = PerRank(dict[tuple[int, ...], DeadlockWatch])
"""The watches of the initialized process group, by their ranks."""


def watch_of(topology: Watchable) -> DeadlockWatch:
    """The watch of the ranks of ``topology``, which it watches from now on. Collective at the first use."""
    store, ranks = dist.distributed_c10d._get_default_store(), topology.global_ranks
    current = _CURRENT()
    if any(watch.store is not store for watch in current.values()):
        current.clear()
    if ranks not in current:
        group = topology.world.group
        assert group is not None, "a rank alone waits for nobody"
        current[ranks] = DeadlockWatch(ranks, topology.rank, group)
    watch = current[ranks]
    watch.add(topology)
    return watch


@atexit.register
def _end_all() -> None:
    for watch in _CURRENT().values():
        watch.end()
