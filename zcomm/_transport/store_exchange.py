"""Ranks meet in torch.distributed's store: each says a text and gets everybody's, or learns who did not come.

    rank r --set--> <ranks>/<number>/<r>        its text
    last to come, or first to give up --> <ranks>/<number>/outcome      "go", or why not: one value for all, for ever
    rank r --set--> last/<r>                    which meeting it went to last, for those who miss it elsewhere

No collective is started, so a rank that is somewhere else disturbs nothing. Meetings of the same ranks are numbered;
a rank that comes to one that was given up gets the same error as those who waited, and the numbers stay in step.

Cost for each rank: three requests to the store and world_size reads of it (one, where the store has multi_get), and a
request for each look while it waits, from 0.5 ms apart to 20 ms.

A store that outlives its ranks: what those of this start say is kept apart from what dead ones have left there.

torchrun's agent keeps one store for all restarts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Nothing in the
environment numbers the starts alike everywhere: an agent that was itself replaced counts its restarts anew. So the
ranks agree on a name:

    rank r --set--> hello/<r>               a random word, new in each process
    the first --set--> offer                a random name, and the words it has read; anew whenever a word changes
    rank r --set--> taken/<r>               the name, if the offer holds its own word
    the first, once every rank has taken the latest offer, or first to give up after taking it --set--> outcome/<name>

Invariants:
    B1  A word or name of a dead rank is never taken for one of this start: each is random, and an offer is taken only
        by the process whose word is in it.
    B2  An offer has one outcome, for ever: those who took it all go on, or all raise the same error. A rank whose word
        is in none waits its own timeout: for all it can know, those who gave up are dead and others on their way.

Cost for each rank: some requests to the store, looks from 0.5 ms apart to 20 ms; nothing where the store is new, or a
default process group has been marked fresh.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zcomm._transport.collective_log import failing
from zcomm.errors import CommunicationError

GO = "go"
FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.02
_FRESH: WeakSet[dist.ProcessGroup] = WeakSet()


def outlives_ranks() -> bool:
    """Whether torch.distributed's store is that of torchrun's agent, which keeps it over restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def mark_fresh() -> None:
    """The default process group was made in a store of this start alone: below it nobody agrees again."""
    group = dist.group.WORLD
    assert group is not None, "no default process group"
    _FRESH.add(group)


def prefix_of_start(store: Any, prefix: str, ranks: Sequence[int], rank: int, timeout: timedelta | None) -> str:
    """``prefix``, and if ``store`` outlives its ranks a name behind it that no earlier start has used.

    Args:
        store: Of torch.distributed, or what is to become its own; the same keys in it on every rank.
        prefix: The same on every rank that calls this together; also where they agree.
        ranks: Those who call this together, as torch.distributed numbers them; the same on each.
        rank: This one of them.
        timeout: How long to wait for the others; None: torch.distributed's default.

    Raises:
        CommunicationError: Not all came in time. Names the ranks, as far as this one can know them.
    """
    is_fresh = dist.is_initialized() and dist.group.WORLD in _FRESH
    if not outlives_ranks() or len(ranks) == 1 or is_fresh:
        return prefix
    start = _NamespaceAgreement(PrefixStore(f"{prefix}/start", store), ranks, rank)
    return f"{prefix}/{start.agree(timeout or dist.default_pg_timeout)}"


class _NamespaceAgreement:
    """One rank's part of the agreement on a name."""

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store, self._ranks, self._rank = store, list(ranks), rank
        self._leads = rank == self._ranks[0]
        self._word = secrets.token_hex(8)
        self._name = ""
        """Of the latest offer that this rank has made or taken."""
        self._offered: list[str | None] = []

    def agree(self, timeout: timedelta) -> str:
        begin, pause_s = time.monotonic(), FIRST_LOOK_S
        self.greet()
        while not (outcome := self.look()):
            if time.monotonic() - begin > timeout.total_seconds():
                outcome = self.give_up(timeout)
                break
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        if outcome != GO:
            raise CommunicationError(outcome)
        return self._name

    def greet(self) -> None:
        self._store.set(f"hello/{self._rank}", self._word)

    def look(self) -> str:
        """The outcome for this rank; empty: there is none yet."""
        return self._lead() if self._leads else self._follow()

    def give_up(self, timeout: timedelta) -> str:
        """Whatever the outcome is now: the others may have gone on since the last look."""
        missing = self._missing()
        if not missing and self._leads:
            return self._settle(GO)
        of, absent = (", ".join(map(str, ranks)) for ranks in (self._ranks, missing or self._ranks[:1]))
        text = f"of ranks {of} not all came within {timeout.total_seconds():g} s of a start: {absent}"
        return self._settle(text) if self._name else text

    def _settle(self, outcome: str) -> str:
        """The outcome of the latest offer: this one, if there is none yet."""
        return str(self._store.compare_set(f"outcome/{self._name}", "", outcome).decode())

    def _lead(self) -> str:
        words = [self._read(f"hello/{rank}") for rank in self._ranks]
        if words != self._offered:
            self._name, self._offered = secrets.token_hex(8), words
            self._store.set("offer", json.dumps([self._name, words]))
        return (self._read(f"outcome/{self._name}") or "") if self._missing() else self._settle(GO)

    def _follow(self) -> str:
        name, words = json.loads(self._read("offer") or '["", []]')
        if len(words) != len(self._ranks) or words[self._ranks.index(self._rank)] != self._word:
            return ""
        if name != self._name:
            self._name = name
            self._store.set(f"taken/{self._rank}", name)
        return self._read(f"outcome/{name}") or ""

    def _missing(self) -> list[int]:
        """Ranks that have not taken the latest offer; the first while there is none for this rank."""
        if not self._name:
            return self._ranks[:1]
        return [rank for rank in self._ranks[1:] if self._read(f"taken/{rank}") != self._name]

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


PREFIX = "zcomm/meeting"
LAST = f"{PREFIX}/last{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.02


def meet(ranks: Sequence[int], said: str, *, lane: str, timeout: timedelta | None) -> list[str]:
    """Every rank's text, in the order of ``ranks``.

    Args:
        ranks: Of torch.distributed, this one among them; the same on each of them.
        said: This rank's text.
        lane: Meetings of equal ``ranks`` and lane are numbered in the order of the calls.
        timeout: How long to wait for the others; None: torch.distributed's default.

    Raises:
        CommunicationError: Not all came in time. Names the ranks and, where known, what they do instead.
    """
    with failing("a meeting of ranks in the store", ranks):
        return _meetings().meet(tuple(ranks), said, lane, timeout or dist.default_pg_timeout)


class _Meetings:
    """The meetings of this process in one store."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._client = store.clone() if hasattr(store, "clone") else store  # a request of another thread may block
        self._rank = dist.get_rank()
        self._num_held: dict[str, int] = {}
        self._places: dict[str, str] = {}
        """By ranks and lane, the prefix of their meetings."""
        self._has_multi_get = bool(self._client.has_extended_api())

    def meet(self, ranks: tuple[int, ...], said: str, lane: str, timeout: timedelta) -> list[str]:
        name = hashlib.sha256(json.dumps([ranks, lane]).encode()).hexdigest()[:16]
        if name not in self._places:
            self._places[name] = prefix_of_start(self._client, f"{PREFIX}/{name}", ranks, self._rank, timeout)
        number = self._num_held[name] = self._num_held.get(name, 0) + 1
        place = f"{self._places[name]}/{number}"
        keys = [f"{place}/{rank}" for rank in ranks]
        self._client.set(f"{place}/{self._rank}", said)
        self._client.set(f"{LAST}/{self._rank}", json.dumps([place, ranks, said]))
        outcome = self._outcome(place, ranks, keys, timeout)
        if outcome != GO:
            raise CommunicationError(outcome)
        texts = [value.decode() for value in self._read(keys)]
        if number > 1:  # all have come here, so all have read what was said there
            self._client.delete_key(f"{self._places[name]}/{number - 1}/{self._rank}")
        return texts

    def _outcome(self, place: str, ranks: tuple[int, ...], keys: list[str], timeout: timedelta) -> str:
        begin, pause_s = time.monotonic(), FIRST_LOOK_S
        key, outcome = f"{place}/outcome", b""
        while not outcome:
            if self._client.check(keys):
                outcome = self._client.compare_set(key, "", GO)
            elif self._client.check([key]):
                outcome = self._client.get(key)
            elif time.monotonic() - begin > timeout.total_seconds():
                outcome = self._client.compare_set(key, "", self._missing(ranks, keys, timeout))
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        return outcome.decode()

    def _missing(self, ranks: tuple[int, ...], keys: list[str], timeout: timedelta) -> str:
        has_come = {rank: bool(self._client.check([key])) for rank, key in zip(ranks, keys, strict=True)}
        absent = ", ".join(str(rank) for rank, came in has_come.items() if not came)
        lines = [f"of ranks {', '.join(map(str, ranks))} not all came within {timeout.total_seconds():g} s: {absent}"]
        for key, (rank, came) in zip(keys, has_come.items(), strict=True):
            lines.append(f"  rank {rank}: {self._client.get(key).decode() if came else self._elsewhere(rank)}")
        return "\n".join(lines)

    def _elsewhere(self, rank: int) -> str:
        """What ``rank`` does, as far as it has told."""
        key = f"{LAST}/{rank}"
        if not self._client.check([key]):
            return "has made no call yet"
        place, ranks, said = json.loads(self._client.get(key))
        mine = f"{place}/{rank}"
        awaited = [other for other in ranks if not self._client.check([f"{place}/{other}"])]
        if not awaited or not self._client.check([mine]):
            return f"has made no call since {said}"
        of = ", ".join(map(str, ranks))
        return f"waits for ranks {', '.join(map(str, awaited))} in another call, of ranks {of}: {said}"

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._has_multi_get:
            return list(self._client.multi_get(keys))
        return [self._client.get(key) for key in keys]


_CURRENT: list[_Meetings] = []
"""Of the process group that is initialised; another one begins to count anew."""


def _meetings() -> _Meetings:
    store = dist.distributed_c10d._get_default_store()
    if not _CURRENT or _CURRENT[0].store is not store:
        _CURRENT[:] = [_Meetings(store)]
    return _CURRENT[0]
