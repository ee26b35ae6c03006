"""Exchanging texts through torch.distributed's store: an all-gather without a collective, with errors that name ranks.

    rank r --set--> <ranks>/<number>/<r>        its text
    last rank to arrive, or first to time out --> <ranks>/<number>/outcome     "go" or the error: written once
    rank r --set--> last/<r>                    its latest store exchange, for ranks that wait for it in another one

No collective is started, so a rank that is elsewhere cannot mix up its messages with these. Exchanges of the same ranks
are numbered. A rank that arrives after a timeout gets the same error as those that waited, so the numbers stay equal.

Cost for each rank: three requests to the store and world_size reads (one if the store has multi_get), and a poll every
0.5 to 20 ms while it waits.

A store that outlives its ranks needs a new namespace at each start, since it still has the keys of dead ranks.
torchrun's agent keeps one store over all restarts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Nothing in the
environment numbers the starts consistently: an agent that was itself replaced counts its restarts anew. So the ranks
agree on a name:

    rank r     --set--> hello/<r>           a random word, new in each process
    first rank --set--> offer               a random name and the words it has read; a new one whenever a word changes
    rank r     --set--> taken/<r>           the name, if the offer has its own word
    first rank --set--> outcome/<name>      once every rank has taken the latest offer; or the first rank to time out
                                            after it has taken the offer

Invariants:
    X1  A word or name of a dead rank is never used in this start: each is random, and a rank takes an offer only if it
        has the rank's own word.
    X2  An offer has exactly one outcome: all ranks that took it continue, or all raise the same error. A rank whose
        word is in no offer waits for its own timeout: those that timed out may be dead ranks of an earlier start.

Cost for each rank: some requests to the store, polled every 0.5 to 20 ms; none if the store is new or the default
process group is marked fresh.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zcomm._base.rank_context import PerRank, clock
from zcomm._transport.collective_log import failing
from zcomm._transport.tagged_group import given
from zcomm.errors import CommunicationError

GO = "go"
MIN_POLL_S, MAX_POLL_S = 0.0005, 0.02
_FRESH: WeakSet[dist.ProcessGroup] = WeakSet()


def outlives_ranks() -> bool:
    """Whether torch.distributed's store belongs to torchrun's agent, which keeps it over restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def mark_fresh() -> None:
    """Note that the default process group's store is used by this start only: its keys need no agreed name."""
    _FRESH.add(given(None))


def prefix_of_start(store: Any, prefix: str, ranks: Sequence[int], rank: int, timeout: timedelta | None) -> str:
    """``prefix``; if ``store`` outlives its ranks, followed by a name that no earlier start has used.

    Args:
        store: The store of torch.distributed, or the one that it will use. All ranks see the same keys.
        prefix: The same on all ``ranks``. The agreement uses keys below it.
        ranks: Global ranks of all callers; the same on each.
        rank: The global rank of this process.
        timeout: How long to wait for the others; None: torch.distributed's default.

    Raises:
        CommunicationError: Some ranks did not arrive in time. Names them, as far as this rank knows them.
    """
    is_fresh = dist.is_initialized() and dist.group.WORLD in _FRESH
    if not outlives_ranks() or len(ranks) == 1 or is_fresh:
        return prefix
    start = _NamespaceAgreement(PrefixStore(f"{prefix}/start", store), ranks, rank)
    return f"{prefix}/{start.agree(timeout or dist.default_pg_timeout)}"


class _NamespaceAgreement:
    """One rank's part in the agreement on a namespace, as drawn above."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store, self._ranks, self._rank = store, list(ranks), rank
        self._leads = rank == self._ranks[0]
        self._word = secrets.token_hex(8)
        self._name = ""
        """The name in the latest offer that this rank has made or taken."""
        self._offered: list[str | None] = []

    def agree(self, timeout: timedelta) -> str:
        begin, pause_s = clock().monotonic(), MIN_POLL_S
        self.publish_word()
        while not (outcome := self.poll()):
            if clock().monotonic() - begin > timeout.total_seconds():
                outcome = self.give_up(timeout)
                break
            clock().sleep(pause_s)
            pause_s = min(1.5 * pause_s, MAX_POLL_S)
        if outcome != GO:
            raise CommunicationError(outcome)
        return self._name

    def publish_word(self) -> None:
        self._store.set(f"hello/{self._rank}", self._word)

    def poll(self) -> str:
        """The outcome for this rank; empty if there is none yet."""
        return self._lead() if self._leads else self._follow()

    def give_up(self, timeout: timedelta) -> str:
        """The outcome after a timeout. It may still be "go": the others may have finished since the last poll."""
        missing = self._missing()
        if not missing and self._leads:
            return self._decide(GO)
        of, absent = (", ".join(map(str, ranks)) for ranks in (self._ranks, missing or self._ranks[:1]))
        text = f"of ranks {of} not all came within {timeout.total_seconds():g} s of a start: {absent}"
        return self._decide(text) if self._name else text

    def _decide(self, outcome: str) -> str:
        """Write ``outcome`` unless the latest offer has one; returns the one it has (X2: compare_set is atomic)."""
        return str(self._store.compare_set(f"outcome/{self._name}", "", outcome).decode())

    def _lead(self) -> str:
        words = [self._read(f"hello/{rank}") for rank in self._ranks]
        if words != self._offered:
            self._name, self._offered = secrets.token_hex(8), words
            self._store.set("offer", json.dumps([self._name, words]))
        return (self._read(f"outcome/{self._name}") or "") if self._missing() else self._decide(GO)

    def _follow(self) -> str:
        name, words = json.loads(self._read("offer") or '["", []]')
        if len(words) != len(self._ranks) or words[self._ranks.index(self._rank)] != self._word:
            return ""
        if name != self._name:
            self._name = name
            self._store.set(f"taken/{self._rank}", name)
        return self._read(f"outcome/{name}") or ""

    def _missing(self) -> list[int]:
        """Ranks that have not taken the latest offer; the first rank while there is no offer for this one."""
        if not self._name:
            return self._ranks[:1]
        return [rank for rank in self._ranks[1:] if self._read(f"taken/{rank}") != self._name]

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


PREFIX = "zcomm/meeting"
LAST = f"{PREFIX}/last{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def exchange_texts(ranks: Sequence[int], text: str, *, lane: str, timeout: timedelta | None) -> list[str]:
    """Every rank's text, in the order of ``ranks``.

    Args:
        ranks: Global ranks of all callers, in the same order on each of them.
        text: This rank's text.
        lane: Exchanges with equal ``ranks`` and lane are numbered in the order of the calls.
        timeout: How long to wait for the others; None: torch.distributed's default.

    Raises:
        CommunicationError: Some ranks did not arrive in time. Names them and, if known, what they do instead.
    """
    with failing("an exchange through the store", ranks):
        return _store_exchanges().exchange_texts(tuple(ranks), text, lane, timeout or dist.default_pg_timeout)


class _StoreExchanges:
    """The exchanges of this process through one store."""

    def __init__(self, store: Any) -> None:
        self.store = store
        # A connection of its own: a blocking request of another thread would hold the lock of a shared one.
        self._client = store.clone() if hasattr(store, "clone") else store
        self._rank = dist.get_rank()
        self._num_held: dict[str, int] = {}
        self._places: dict[str, str] = {}
        """Key prefix by ranks and lane."""
        self._has_multi_get = bool(self._client.has_extended_api())

    def exchange_texts(self, ranks: tuple[int, ...], text: str, lane: str, timeout: timedelta) -> list[str]:
        name = hashlib.sha256(json.dumps([ranks, lane]).encode()).hexdigest()[:16]
        if name not in self._places:
            self._places[name] = prefix_of_start(self._client, f"{PREFIX}/{name}", ranks, self._rank, timeout)
        number = self._num_held[name] = self._num_held.get(name, 0) + 1
        place = f"{self._places[name]}/{number}"
        keys = [f"{place}/{rank}" for rank in ranks]
        self._client.set(f"{place}/{self._rank}", text)
        self._client.set(f"{LAST}/{self._rank}", json.dumps([place, ranks, text]))
        outcome = self._outcome(place, ranks, keys, timeout)
        if outcome != GO:
            raise CommunicationError(outcome)
        texts = [value.decode() for value in self._read(keys)]
        if number > 1:  # every rank has arrived here, so every rank has read the texts of the exchange before
            self._client.delete_key(f"{self._places[name]}/{number - 1}/{self._rank}")
        return texts

    def _outcome(self, place: str, ranks: tuple[int, ...], keys: list[str], timeout: timedelta) -> str:
        begin, pause_s = clock().monotonic(), MIN_POLL_S
        key, outcome = f"{place}/outcome", b""
        while not outcome:
            if self._client.check(keys):
                outcome = self._client.compare_set(key, "", GO)
            elif self._client.check([key]):
                outcome = self._client.get(key)
            elif clock().monotonic() - begin > timeout.total_seconds():
                outcome = self._client.compare_set(key, "", self._missing(ranks, keys, timeout))
            else:
                clock().sleep(pause_s)
                pause_s = min(1.5 * pause_s, MAX_POLL_S)
        return outcome.decode()

    def _missing(self, ranks: tuple[int, ...], keys: list[str], timeout: timedelta) -> str:
        has_come = {rank: bool(self._client.check([key])) for rank, key in zip(ranks, keys, strict=True)}
        absent = ", ".join(str(rank) for rank, came in has_come.items() if not came)
        lines = [f"of ranks {', '.join(map(str, ranks))} not all came within {timeout.total_seconds():g} s: {absent}"]
        for key, (rank, came) in zip(keys, has_come.items(), strict=True):
            lines.append(f"  rank {rank}: {self._client.get(key).decode() if came else self._elsewhere(rank)}")
        return "\n".join(lines)

    def _elsewhere(self, rank: int) -> str:
        """What ``rank``, which has not arrived, does instead, according to its latest store exchange."""
        key = f"{LAST}/{rank}"
        if not self._client.check([key]):
            return "has made no call yet"
        place, ranks, text = json.loads(self._client.get(key))
        mine = f"{place}/{rank}"
        awaited = [other for other in ranks if not self._client.check([f"{place}/{other}"])]
        if not awaited or not self._client.check([mine]):
            return f"has made no call since {text}"
        of = ", ".join(map(str, ranks))
        return f"waits for ranks {', '.join(map(str, awaited))} in another call, of ranks {of}: {text}"

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._has_multi_get:
            return list(self._client.multi_get(keys))
        return [self._client.get(key) for key in keys]


_CURRENT = PerRank(list[_StoreExchanges])
"""For the initialized process group; another one starts counting again."""


def _store_exchanges() -> _StoreExchanges:
    store = dist.distributed_c10d._get_default_store()
    current = _CURRENT()
    if not current or current[0].store is not store:
        current[:] = [_StoreExchanges(store)]
    return current[0]
