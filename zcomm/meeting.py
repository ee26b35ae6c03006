"""Ranks meet in torch.distributed's store: each says a text and gets everybody's, or learns who did not come.

    rank r --set--> <ranks>/<number>/<r>        its text
    last to come, or first to give up --> <ranks>/<number>/outcome      "go", or why not: one value for all, for ever
    rank r --set--> last/<r>                    which meeting it went to last, for those who miss it elsewhere

No collective is started, so a rank that is somewhere else disturbs nothing. Meetings of the same ranks are numbered;
a rank that comes to one that was given up gets the same error as those who waited, and the numbers stay in step.

Cost for each rank: three requests to the store and world_size reads of it (one, where the store has multi_get), and a
request for each look while it waits, from 0.5 ms apart to 20 ms.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zcomm.errors import CommunicationError
from zcomm.ledger import failing
from zcomm.starts import prefix_of_start

__all__ = ["meet"]

GO = "go"
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
