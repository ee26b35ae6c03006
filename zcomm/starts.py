"""A store that outlives its ranks: what those of this start say is kept apart from what dead ones have left there.

torchrun's agent keeps one store for all restarts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Nothing in the
environment numbers the starts alike everywhere: an agent that was itself replaced counts its restarts anew. So the
ranks agree on a name:

    rank r --set--> hello/<r>       a random word, new in each process
    rank 0 --set--> offer           a random name, and the words it has read; anew whenever a word changes
    rank r --set--> taken/<r>       the name, if the offer holds its own word
    rank 0 --set--> go/<name>       once every rank has taken the latest offer

Invariant:
    B1  A word or name of a dead rank is never taken for one of this start: each is random, and an offer is taken only
        by the process whose word is in it.

Cost for each rank: some requests to the store, looks from 0.5 ms apart to 20 ms; nothing where the store is new.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zcomm.errors import CommunicationError

__all__ = ["outlives_ranks", "prefix_of_start"]

FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.02


def outlives_ranks() -> bool:
    """Whether torch.distributed's store is that of torchrun's agent, which keeps it over restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def prefix_of_start(store: Any, prefix: str, rank: int, size: int, timeout: timedelta | None) -> str:
    """``prefix``, and if ``store`` outlives its ranks a name behind it that no earlier start has used.

    Args:
        store: Of torch.distributed; the same keys in it on every rank.
        prefix: The same on every rank that calls this together; also where they agree.
        rank: This one, of ``size``.
        size: How many there are.
        timeout: How long to wait for the others; None: torch.distributed's default.

    Raises:
        CommunicationError: Not all came in time. Names the ranks, as far as this one can know them.
    """
    if not outlives_ranks() or size == 1:
        return prefix
    start = _Start(PrefixStore(f"{prefix}/start", store), rank, size)
    return f"{prefix}/{start.agree(timeout or dist.default_pg_timeout)}"


class _Start:
    """One rank's part of the agreement on a name."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._word = secrets.token_hex(8)
        self._name = ""
        """Of the latest offer that this rank has made or taken."""
        self._offered: list[str | None] = []

    def agree(self, timeout: timedelta) -> str:
        begin, pause_s = time.monotonic(), FIRST_LOOK_S
        self._store.set(f"hello/{self._rank}", self._word)
        look = self._lead if self._rank == 0 else self._follow
        while not look():
            if time.monotonic() - begin > timeout.total_seconds():
                missing = ", ".join(map(str, self._missing()))
                raise CommunicationError(
                    f"of {self._size} ranks not all came within {timeout.total_seconds():g} s of a start: {missing}"
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        return self._name

    def _lead(self) -> bool:
        """Rank 0 looks once: whether all have taken its latest offer."""
        words = [self._read(f"hello/{rank}") for rank in range(self._size)]
        if words != self._offered:
            self._name, self._offered = secrets.token_hex(8), words
            self._store.set("offer", json.dumps([self._name, words]))
        if self._missing():
            return False
        self._store.set(f"go/{self._name}", "go")
        return True

    def _follow(self) -> bool:
        """Another rank looks once: whether it has taken the offer with which all go on."""
        name, words = json.loads(self._read("offer") or '["", []]')
        if len(words) != self._size or words[self._rank] != self._word:
            return False
        if name != self._name:
            self._name = name
            self._store.set(f"taken/{self._rank}", name)
        return self._read(f"go/{name}") is not None

    def _missing(self) -> list[int]:
        """Ranks that have not taken the latest offer; rank 0 while there is none for this rank."""
        if not self._name:
            return [0]
        return [rank for rank in range(1, self._size) if self._read(f"taken/{rank}") != self._name]

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
