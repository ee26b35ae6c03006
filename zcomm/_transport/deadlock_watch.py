"""Ranks that wait for one another for ever, in different calls: found within seconds, and told on every rank.

A thread looks twice a second whether this rank waits, and does nothing else while the rank gets on. A rank that has
not moved between two looks tells the others, in torch.distributed's store, what it has started and what it waits for:

    every rank waits, and each exchange waited for lacks a rank     nobody can ever go on: rank 0 gives the reasons
    every rank has heard that                                       waits will end with DivergedError
    every rank's thread starts what its rank owes the others        all waits end

So the process groups stay usable. One Watch serves all topologies of the same ranks.

A rank that computes or sleeps is slow, and nobody concludes anything, however long it takes. A rank counts as waiting,
too, if its main thread has been in one call of torch.distributed (a barrier, say), or in a meeting of ranks, for
ZCOMM_DIVERGED_AFTER_S seconds, or has ended: where the topology has all ranks of torch.distributed, since otherwise
that call may be between others.

Invariants:
    D1  What a rank tells it could see at one moment at which it waited. So if these accounts, even of different
        moments, say that nobody can go on, nobody can: the first rank to do so would need another to have done before.
    D2  A rank goes on only after all that it owed has been started: its next exchange has the same number everywhere.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._transport import backend, call_context
from zcomm._transport.backend import ALONE, Hop
from zcomm._transport.call_context import StackFrame, stacks_of
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog
from zcomm._transport.deadlock_analysis import Owed, RankProgress, lagging, owed_of, will_end
from zcomm._transport.nccl_communicators import IN_ROUTE, Communicators
from zcomm._transport.store_exchange import prefix_of_start
from zcomm._transport.tagged import tag_of
from zcomm._transport.work import WorkQueue
from zcomm.errors import DivergedError


class Watchable(Protocol):
    """A :class:`zcomm.Topology`."""

    world: Hop
    intra: Hop
    inter: Hop
    queue: WorkQueue
    rank: int

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of torch.distributed, in order."""


class Watched(NamedTuple):
    """A hop of one topology, or what it has queued on a stream of a communicator over NCCL."""

    kind: str
    ledger: CollectiveLog
    global_ranks: Sequence[int]
    sends: bool
    """Whether exchanges of different calls never meet, or never end."""
    hop: Hop = ALONE
    """Alone: it is a communicator's, which ``abort`` ends."""
    beside: Hop = ALONE
    """The other hop of a collective of two, if there is one."""
    abort: Callable[[str], None] | None = None


def abort_unequal(watched: Mapping[str, Watched], owed: Mapping[str, Owed], reason: str) -> None:
    """Abort the communicators of routes over which not all ranks have queued the same: on all ranks of each."""
    routes = {name.partition(IN_ROUTE)[0] for name, of_hop in owed.items() if of_hop.calls}
    for name, one in watched.items():
        if one.abort is not None and name.partition(IN_ROUTE)[0] in routes:
            one.abort(reason)


def complete(watched: Watched, owed: Owed) -> list[Pending]:
    """Start what this rank owes over one hop, and bring its numbers to where the others' will be."""
    hop, ledger, works = watched.hop, watched.ledger, []
    num_started, _, recent, _ = ledger.account()
    mine = {num_started - back: call for back, call in enumerate(reversed(recent))}
    for number, call in owed.calls:
        own = mine.get(number)
        is_mine = own is not None and (not hop.sends(call.device_type) or tag_of(number, own) == tag_of(number, call))
        while ledger.num_started < number:
            ledger.start(call)
        if not is_mine and watched.abort is None:
            works.append(backend.take_part(number, call, hop.next_to(watched.beside) if call.beside else hop))
    ledger.num_beside = max(ledger.num_beside, owed.num_beside)
    return works


def watched_of(topology: Watchable) -> Iterator[tuple[str, Watched]]:
    """All that ``topology`` exchanges over, by names that are the same on all ranks of each."""
    for watched in hops_of(topology):
        yield _name_of(watched.hop), watched
    communicators: Communicators | None = topology.world.communicators
    for stream in () if communicators is None else communicators.streams(name_of(topology)):
        yield stream.name, Watched(stream.name, stream.queued.ledger, stream.queued.ranks, True, abort=stream.abort)


def skip(topology: Watchable, numbers: Mapping[str, int]) -> None:
    """Nobody will use what was queued up to ``numbers`` on streams, by name, on which this rank has queued nothing."""
    communicators: Communicators | None = topology.world.communicators
    if communicators is not None:
        communicators.skip(name_of(topology), numbers)


def hops_of(topology: Watchable) -> Iterator[Watched]:
    """The hops of ``topology`` that have several ranks."""
    t, seen = topology, set[int]()
    of_host: Hop = vars(t).get("on_host", ALONE)
    pairs = (("", t.world, ALONE), ("intra", t.intra, t.inter), ("inter", t.inter, t.intra), ("host", of_host, ALONE))
    for kind, hop, beside in pairs:
        if hop.group is not None and id(hop.ledger) not in seen:
            seen.add(id(hop.ledger))
            ranks = dist.get_process_group_ranks(hop.group)
            yield Watched(f"{name_of(t)}.{kind}", hop.ledger, ranks, hop.sends("cpu"), hop, beside)


def name_of(topology: Watchable) -> str:
    """The same on all its ranks."""
    return _name_of(topology.world)


def _name_of(hop: Hop) -> str:
    """The same on all its ranks."""
    return "" if hop.group is None else str(hop.group.group_name)


logger = logging.getLogger("zcomm")

PERIOD_S = 0.5
NUM_TRIED = 3  # failures in a row before a rank stops watching
ANSWER_S = 3.0  # the store's time to answer once an exchange has failed


class DeadlockWatch:
    """Watches this rank's exchanges over all topologies of ``global_ranks``, of which this one is number ``rank``."""

    def __init__(self, global_ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = rank, len(global_ranks)
        self._number = {of_job: index for index, of_job in enumerate(global_ranks)}
        self._is_whole = len(global_ranks) == dist.get_world_size()
        self._topologies: tuple[weakref.ref[Watchable], ...] = ()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self.compose: Callable[[Sequence[str]], str] = _compose
        """Makes the error's text of what each rank does, where all of them have noted it (:func:`zcomm._transport.call_context.note`)."""
        self.period_s = PERIOD_S
        """Between two looks; up to four times as much while nothing changes for long."""
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone() if hasattr(store, "clone") else store
        name = f"zcomm/watch/{hashlib.sha256(json.dumps(global_ranks).encode()).hexdigest()[:16]}"
        timeout = backend.timeout_of(group)
        self._prefix = prefix_of_start(self._store, name, global_ranks, global_ranks[rank], timeout)
        self.num_found = 0
        """How often ranks have been found that wait for one another."""
        self._last: str | None = None
        """What the last look saw, if the rank waited."""
        self._has_told = False
        self._store_answers = True  # until a request did not come back in time
        self._stacks: dict[int, tuple[list[StackFrame] | None, float]] = {}
        """Of threads that may be blocked, where they are, and since when."""

    @property
    def has_told(self) -> bool:
        """Whether this rank has waited for so long that the others know."""
        return self._has_told

    def add(self, topology: Watchable) -> None:
        """Watch ``topology``, too, until it is closed or gone."""
        for watched in hops_of(topology):
            watched.ledger.lost = partial(self.lost, name_of(topology))
        with self._lock:
            is_first = not self._topologies
            self._topologies = (*self._alive(), weakref.ref(topology))
            if is_first:
                self._end = threading.Event()
                serve = threading.Thread(target=_serve, args=(weakref.ref(self), self._end), daemon=True)
                serve.name = "zcomm-watch"
                serve.start()

    def remove(self, topology: Watchable) -> None:
        """Let go of ``topology``, which is being closed, and tell the others. The last one ends the thread."""
        self._leave(topology, call_context.describe(threading.get_ident(), "has closed its Topology"))
        with self._lock:
            self._topologies = tuple(one for one in self._alive() if one() is not topology)
            if not self._topologies:
                self._end.set()

    def end(self) -> None:
        """Tell the others that this process ends."""
        for one in self._alive():
            if (topology := one()) is not None:
                self._leave(topology, "has ended")

    def _leave(self, topology: Watchable, text: str) -> None:
        if self._store_answers:
            with suppress(Exception):  # the store has gone, and with it the job
                self._store.set(f"{self._prefix}/left/{name_of(topology)}/{self._rank}", text)

    def lost(self, name: str) -> str:
        """What is known of ranks that have left the topology whose group has that name; empty: nothing."""
        left = self._left(name)
        with suppress(Exception):
            context = call_context.here()
            doing = context.call or context.within or "is in forward or backward"
            mine = call_context.describe(threading.get_ident(), doing)
            return f"{WAITS}{'; '.join([*left, f'rank {self._rank}: {mine}'])}" if left else ""
        return ""

    def _left(self, name: str) -> list[str]:
        """What ranks that have left said. Where the network is cut the store never answers, so a thread asks."""
        keys, found = {rank: f"{self._prefix}/left/{name}/{rank}" for rank in range(self._world_size)}, list[str]()

        def ask() -> None:
            with suppress(Exception):
                there = [rank for rank, key in keys.items() if self._store.check([key])]
                found.extend(f"rank {rank}: {self._store.get(keys[rank]).decode()}" for rank in there)

        if self._store_answers:
            asking = threading.Thread(target=ask, name="zcomm-left", daemon=True)
            with suppress(RuntimeError):  # no thread can be made: the interpreter ends
                asking.start()
                asking.join(ANSWER_S)
            self._store_answers = not asking.is_alive()
        return found if self._store_answers else []

    def _alive(self) -> tuple[weakref.ref[Watchable], ...]:
        return tuple(one for one in self._topologies if one() is not None)

    def look(self) -> bool:
        """Tell, judge and wake, if this rank has not moved since the last look. False: no topology is left."""
        hops = {key: w for one in self._topologies if (t := one()) is not None for key, w in watched_of(t)}
        told = self._account(hops)
        seen = None if told is None else json.dumps(told[1:])
        if seen is None or seen != self._last:
            self._last = seen
            if self._has_told:
                self._has_told = False
                self._store.add(self._key("waiting"), -1)
            return bool(self._alive())
        if not self._has_told:
            self._store.set(self._key(self._rank), json.dumps(self._words(told)))
            self._store.add(self._key("waiting"), 1)
            self._has_told = True
        if self._rank == 0 and self._store.add(self._key("waiting"), 0) == self._world_size:
            self._judge()
        if self._store.check([self._key("verdict")]):
            reason, owed = json.loads(self._store.get(self._key("verdict")))
            self._wake(reason, owed, hops)
        return True

    def _key(self, what: object) -> str:
        return f"{self._prefix}/{self.num_found}/{what}"

    def _account(self, hops: dict[str, Watched]) -> tuple[int | str, dict[str, RankProgress]] | None:
        """The thread that waits, or what the rank does instead, and all exchanges; None while it may get on."""
        queues = [t.queue for one in self._topologies if (t := one()) is not None]
        drivers = {queue.thread_id for queue in queues}
        waiting = {thread for queue in queues for thread in list(queue.waits)}
        accounts, callers = {}, set[int]()
        for key, (kind, ledger, of_job, sends, *_) in hops.items():
            num_started, waits, recent, num_beside = ledger.account()
            waiting |= set(waits)
            callers |= ledger.callers()
            ranks = [self._number[rank] for rank in of_job]
            broken, awaited = ledger.last_broken, sorted(waits.values())
            accounts[key] = RankProgress(ranks, kind, sends, num_started, broken, awaited, recent, num_beside)
        if any(queue.waits and queue.thread_id not in waiting for queue in queues):
            return None  # its thread computes, and will go on to the next exchange
        main = threading.main_thread().ident or 0
        own = waiting - drivers
        others = (callers | {main}) - waiting - drivers - {threading.get_ident()}
        blocked = self._blocked(others, own)
        if blocked is None:
            return None
        doing: int | str = (main if main in own else min(own)) if own else blocked
        return doing, accounts

    def _blocked(self, threads: set[int], waiting: set[int]) -> str | None:
        """What the main thread does if it waits elsewhere; None while one of ``threads`` may get on."""
        stacks, main, found = stacks_of(threads), threading.main_thread(), ""
        for thread in threads:
            stack = stacks.get(thread)
            if thread == main.ident and not main.is_alive():
                found = "has left: its program has ended"
            elif stack is not None:  # a thread of C++ without any is idle
                where = self._where(stack, waiting)
                if not where or (where != IDLE and not self._stands(thread, stack)):
                    return None
                found = where if thread == main.ident else found
        return found if waiting or found not in ("", IDLE) else None

    def _where(self, stack: list[StackFrame], waiting: set[int]) -> str:
        """In what the thread of ``stack`` may be blocked for good; empty: it computes."""
        name, function = stack[0].file, stack[0].function
        if name.endswith("concurrent/futures/thread.py") and function == "_worker":
            return IDLE if waiting else ""
        if function == "_engine_run_backward":  # autograd's own thread may be the one that waits
            ours = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
            return IDLE if waiting - ours else ""
        if waiting and name in (threading.__file__, sys.modules["queue"].__file__):
            return "waits for another thread"
        return call_context.is_blocked_in(stack) if self._is_whole else ""

    def _stands(self, thread: int, stack: list[StackFrame]) -> bool:
        """Whether ``thread`` has not moved for ZCOMM_DIVERGED_AFTER_S."""
        before, since = self._stacks.get(thread, (None, 0.0))
        if before != stack:
            since = time.monotonic()
            self._stacks[thread] = stack, since
        return time.monotonic() - since >= float(env.value("ZCOMM_DIVERGED_AFTER_S"))

    def _words(self, told: tuple[int | str, dict[str, RankProgress]] | None) -> list[Any]:
        """What this rank tells: whether it has noted what it does, in words, and all exchanges."""
        assert told is not None, "told while the rank gets on"
        doing, accounts = told
        if isinstance(doing, str):
            return [False, doing, accounts]
        noted = call_context.noted(doing)
        text = call_context.describe(doing, self._call_of(doing))
        return [bool(noted), f"{noted} ({text})" if noted else text, accounts]

    def _call_of(self, thread: int) -> str:
        for ledger in [w.ledger for one in self._topologies if (t := one()) is not None for _, w in watched_of(t)]:
            number = ledger.account()[1].get(thread)
            if number is not None:
                return ledger.call_name(number, "backward: " if call_context.is_in_backward(thread) else "")
        return "a collective"

    def _judge(self) -> None:
        told = [json.loads(self._store.get(self._key(rank))) for rank in range(self._world_size)]
        world = [{key: RankProgress.read(account) for key, account in of_rank.items()} for *_, of_rank in told]
        if will_end(world) or not any(account.waits for hops in world for account in hops.values()):
            return
        compose = self.compose if all(has_noted for has_noted, *_ in told) else _compose
        reason = compose([text for _, text, _ in told]) + lagging(world)
        self._store.set(self._key("verdict"), json.dumps([reason, owed_of(world)]))

    def _wake(self, reason: str, owed: dict[str, list[Any]], hops: dict[str, Watched]) -> None:
        known = {
            key: Owed(until, [(n, CollectiveCall(*c)) for n, c in more], b) for key, (until, more, b) in owed.items()
        }
        for key, watched in hops.items():
            if key in known:
                watched.ledger.break_until(known[key].until, reason)
        self._store.add(self._key("heard"), 1)
        while self._store.add(self._key("heard"), 0) < self._world_size:  # nobody may wake who would not raise
            time.sleep(0.02)
        abort_unequal(hops, known, reason)
        works = [work for key, watched in hops.items() if key in known for work in complete(watched, known[key])]
        for one in self._topologies:
            if (topology := one()) is not None:
                topology.queue.cancel_all(DivergedError(reason))
                skip(topology, {key: known[key].until for key in known.keys() - hops.keys()})
        for watched in hops.values():
            watched.ledger.settled.set()
        self.num_found, self._last, self._has_told = self.num_found + 1, None, False
        for work in works:
            work.wait()


WAITS = "the ranks make different calls, and would wait for one another for ever: "
IDLE = "is idle"


def _compose(texts: Sequence[str]) -> str:
    return WAITS + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _serve(reference: weakref.ref[DeadlockWatch], end: threading.Event) -> None:
    period_s, num_failed = 0.0, 0
    while not end.wait(period_s):
        if (watch := reference()) is None:
            return
        try:
            if not watch.look():
                continue
            num_failed = 0
        except Exception as error:  # once or twice: the store is late; for good: it has gone, and with it the job
            if (num_failed := num_failed + 1) == NUM_TRIED:
                logger.debug("ranks that wait for one another are no longer found out: %s", error)
                return
        period_s = min(1.2 * period_s, 4 * watch.period_s) if watch.has_told else watch.period_s
        del watch


class _Watches:
    """Those of the process group that is initialised."""

    def __init__(self) -> None:
        self.store: Any = None
        self.by_ranks: dict[tuple[int, ...], DeadlockWatch] = {}


_CURRENT = _Watches()


def watch_of(topology: Watchable) -> DeadlockWatch:
    """The one for the ranks of ``topology``, which it watches from now on. Collective at the first use."""
    store, ranks = dist.distributed_c10d._get_default_store(), topology.global_ranks
    if _CURRENT.store is not store:
        _CURRENT.store, _CURRENT.by_ranks = store, {}
    if ranks not in _CURRENT.by_ranks:
        group = topology.world.group
        assert group is not None, "a rank alone waits for nobody"
        _CURRENT.by_ranks[ranks] = DeadlockWatch(ranks, topology.rank, group)
    watch = _CURRENT.by_ranks[ranks]
    watch.add(topology)
    return watch


@atexit.register
def _end_all() -> None:
    for watch in _CURRENT.by_ranks.values():
        watch.end()
