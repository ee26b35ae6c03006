"""Ranks that wait for one another for ever, in different exchanges: found within seconds, and told on every rank.

A thread looks twice a second whether this rank waits, and does nothing else while the rank gets on. A rank that has
not moved between two looks tells the others, in torch.distributed's store, what it has started and what it waits for:

    every rank waits, and each exchange waited for lacks a rank     nobody can ever go on: rank 0 gives the reasons
      (with ZCOMM_CHECK=1, of two hops: or the verdict of one)
    every rank has heard that                                       waits will end with DivergedError
    every rank's thread starts what its rank owes the others        all waits end

So the process groups stay usable. What a rank does outside of the watched groups is not seen: while it does, nobody
concludes anything.

Invariants:
    D1  What a rank tells it could see at one moment at which it waited. So if these accounts, even of different
        moments, say that nobody can go on, nobody can: the first rank to do so would need another to have done before.
    D2  A rank goes on only after all that it owed has been started: its next exchange has the same number everywhere.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from zcomm import backend
from zcomm.backend import Hop, Pending
from zcomm.errors import DivergedError
from zcomm.lagging import lagging
from zcomm.ledger import Call
from zcomm.starts import prefix_of_start
from zcomm.work import WorkQueue

__all__ = ["Watch", "Watched"]

logger = logging.getLogger("zcomm")


class Watched(NamedTuple):
    """A hop and its ranks, as the topology counts them."""

    hop: Hop
    ranks: tuple[int, ...]
    beside: Hop
    """The other hop of a collective of two, if there is one."""


class Account(NamedTuple):
    """What one rank has started over a hop, and what of it it waits for."""

    ranks: list[int]
    num_started: int
    waits: list[int]
    recent: list[Call]
    num_beside: int

    def num_beside_until(self, number: int) -> int:
        """Of the exchanges up to that one, how many end with the other hop's."""
        after = self.recent[len(self.recent) - (self.num_started - number) :] if number < self.num_started else []
        return self.num_beside - sum(call.is_heard_beside for call in after)


class Watch:
    """Watches this rank's exchanges.

    Args:
        hops: All over which the ranks wait for one another; the same kinds in the same order on every rank.
        queues: Whose threads drive collectives.
        rank: This one.
        global_ranks: All of them, as torch.distributed numbers them.
    """

    def __init__(
        self, hops: Sequence[Watched], queues: Sequence[WorkQueue], rank: int, global_ranks: Sequence[int]
    ) -> None:
        self._hops = {f"{index}.{watched.ranks[0]}": watched for index, watched in enumerate(hops)}
        self._queues, self._rank, self._world_size = list(queues), rank, len(global_ranks)
        self.doing: Callable[[], str] = lambda: "waits"
        """What this rank does now, in words."""
        self.compose: Callable[[Sequence[str]], str] = _compose
        """Makes the error's text of what each rank does."""
        self.period_s = 0.5
        """Between two looks; up to four times as much while nothing changes for long."""
        store: Any = dist.distributed_c10d._get_default_store()
        name = next(watched.hop.group.group_name for watched in hops if watched.hop.group is not None)
        self._store = store.clone() if hasattr(store, "clone") else store
        group = hops[0].hop.group
        timeout = backend.timeout_of(group) if group is not None else None
        self._prefix = prefix_of_start(self._store, f"zcomm/watch/{name}", global_ranks, global_ranks[rank], timeout)
        self.num_found = 0
        """How often ranks have been found that wait for one another."""
        self._last: str | None = None
        """What the last look saw, if the rank waited."""
        self._has_told = False
        self._closed = threading.Event()
        threading.Thread(target=_serve, args=(weakref.ref(self), self._closed), name="zcomm-watch", daemon=True).start()

    @property
    def has_told(self) -> bool:
        """Whether this rank has waited for so long that the others know."""
        return self._has_told

    def close(self) -> None:
        """End the thread, and let go of the process groups."""
        self._closed.set()
        self._hops = {}

    def look(self) -> None:
        """Tell, judge and wake, if this rank has not moved since the last look."""
        seen = self._account()
        if seen is None or seen != self._last:
            self._last = seen
            if self._has_told:
                self._has_told = False
                self._store.add(self._key("waiting"), -1)
            return
        if not self._has_told:
            self._store.set(self._key(self._rank), json.dumps([self.doing(), *json.loads(seen)]))
            self._store.add(self._key("waiting"), 1)
            self._has_told = True
        if self._rank == 0 and self._store.add(self._key("waiting"), 0) == self._world_size:
            self._judge()
        if self._store.check([self._key("verdict")]):
            self._wake(*json.loads(self._store.get(self._key("verdict"))))

    def _key(self, what: object) -> str:
        return f"{self._prefix}/{self.num_found}/{what}"

    def _account(self) -> str | None:
        """What has been started over each hop and is waited for; None while the rank may get on by itself."""
        drivers = {queue.thread_id for queue in self._queues}
        waiting = {thread for queue in self._queues for thread in list(queue.waits)}
        hops = {}
        for key, (hop, ranks, _) in self._hops.items():
            num_started, waits, recent, num_beside = hop.ledger.account()
            waiting |= set(waits)
            hops[key] = Account(list(ranks), num_started, list(waits.values()), recent, num_beside)
        if any(queue.waits and queue.thread_id not in waiting for queue in self._queues):
            return None  # its thread computes, and will go on to the next exchange
        return json.dumps([hops]) if waiting - drivers else None

    def _judge(self) -> None:
        told = [json.loads(self._store.get(self._key(rank))) for rank in range(self._world_size)]
        hops = [{key: _read(account) for key, account in of_rank.items()} for _, of_rank in told]
        if any(_will_end(key, account, hops) for of_rank in hops for key, account in of_rank.items()):
            return
        furthest = _furthest(hops)
        texts = [text for text, _ in told]
        self._store.set(self._key("verdict"), json.dumps([self.compose(texts) + lagging(hops), furthest]))

    def _wake(self, reason: str, furthest: dict[str, tuple[int, list[Any]]]) -> None:
        owed: list[Pending] = []
        for key, watched in self._hops.items():
            watched.hop.ledger.break_until(furthest[key][0], reason)
        self._store.add(self._key("heard"), 1)
        while self._store.add(self._key("heard"), 0) < self._world_size:  # nobody may wake who would not raise
            time.sleep(0.02)
        for key, (hop, _, beside) in self._hops.items():
            number, recent = furthest[key]
            missing = number - hop.ledger.num_started
            for call in [Call(*call) for call in recent[len(recent) - missing :] if missing]:
                owed.append(backend.take_part(call, hop.next_to(beside) if call.is_heard_beside else hop))
        for queue in self._queues:
            queue.cancel_all(DivergedError(reason))
        for watched in self._hops.values():
            watched.hop.ledger.settled.set()
        self.num_found, self._last, self._has_told = self.num_found + 1, None, False
        for pending in owed:
            pending.wait()


def _read(account: list[Any]) -> Account:
    ranks, num_started, waits, recent, num_beside = account
    return Account(ranks, num_started, waits, [Call(*call) for call in recent], num_beside)


def _kind(key: str) -> str:
    """Hops of one kind, between them, hold every rank once."""
    return key.partition(".")[0]


def _will_end(key: str, account: Account, hops: Sequence[Mapping[str, Account]]) -> bool:
    """Whether something that is waited for ends by itself: all whom it needs have started it."""
    fewest = min(hops[rank][key].num_started for rank in account.ranks)
    of_kind = [other.num_beside for of_rank in hops for name, other in of_rank.items() if _kind(name) == _kind(key)]
    return any(n <= fewest and account.num_beside_until(n) <= min(of_kind) for n in account.waits)


def _furthest(hops: Sequence[Mapping[str, Account]]) -> dict[str, tuple[int, list[Call]]]:
    """How many exchanges each hop needs for all to end, with the last calls.

    The rank that has started the most says so, of each hop, and of hops of one kind for those that end together.
    """
    of_hops: dict[str, Account] = {}
    of_kinds: dict[str, Account] = {}
    for of_rank in hops:
        for key, account in of_rank.items():
            of_hops[key] = max(of_hops.get(key, account), account, key=lambda one: one.num_started)
            of_kinds[_kind(key)] = max(of_kinds.get(_kind(key), account), account, key=lambda one: one.num_beside)
    furthest = {}
    for key, account in of_hops.items():
        ahead = of_kinds[_kind(key)]
        missing = ahead.num_beside - account.num_beside
        together = [call for call in ahead.recent if call.is_heard_beside]
        calls = account.recent + together[len(together) - missing :]
        furthest[key] = (account.num_started + missing, calls)
    return furthest


def _compose(texts: Sequence[str]) -> str:
    return "the ranks wait for one another: " + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _serve(reference: weakref.ref[Watch], closed: threading.Event) -> None:
    period_s = 0.0
    while not closed.wait(period_s):
        watch = reference()
        if watch is None:
            return
        try:
            watch.look()
        except Exception as error:  # the store has gone, and with it the job
            logger.debug("ranks that wait for one another are no longer found out: %s", error)
            return
        period_s = min(1.2 * period_s, 4 * watch.period_s) if watch.has_told else watch.period_s
        del watch
