"""Do all ranks gather the same parameters? Asked before an exchange, so that the answer is an error and not a hang.

Exchanges of different parameters would meet each other: of equal size they give wrong numbers, else they never end. The
question travels over process groups of its own, by which nothing else is disturbed. A rank that follows its plan does
not ask: where it meets one that does, both wait, and :class:`zcomm.watch.Watch` finds them out.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from zcomm import DivergedError, Topology, calls, control, env

__all__ = ["OrderCheck"]


class OrderCheck:
    """Compares what the ranks are about to do.

    Args:
        topology: The ranks. Its companion's companion is made here, which is collective.
    """

    def __init__(self, topology: Topology) -> None:
        self._watch = None if topology.world_size == 1 else topology.watch
        self._ranks = topology if topology.world_size == 1 else topology.companion.companion
        self._num_unequal = 0
        self._doing: Callable[[], str] = lambda: "waits"
        self.is_always_on = env.is_set("ZERO_DEBUG")

    def note(self, doing: Callable[[], str]) -> None:
        """What this rank is about to do, in words that are asked for if the ranks wait for one another."""
        self._doing = doing
        calls.note(partial(_answer, weakref.ref(self)))
        if self._watch is not None:
            self._watch.compose = _compose

    @property
    def num_divergences(self) -> int:
        """How often the ranks have been found to do different things; the same on all of them."""
        return self._num_unequal + (0 if self._watch is None else self._watch.num_found)

    def compare(self, call: str, detail: str = "") -> None:
        """Raise DivergedError, on every rank and with every rank's ``detail`` or ``call``, unless calls are equal.

        Collective; all comparisons travel over the same groups, whatever is compared.

        Cost for each rank: 8 bytes to every other rank, and one wait for the slowest.
        """
        if self._watch is None:
            return
        mine = torch.tensor([float(zlib.crc32(call.encode()))], dtype=torch.float64)
        if bool((control.gather_float64(mine, self._ranks) != mine).any()):
            self._num_unequal += 1
            raise DivergedError(_compose(control.gather_texts(detail or call, self._ranks)))

    def agree_ends(self, ends: list[int]) -> list[int]:
        """The latest end of each use on any rank; as many on every rank."""
        return [int(v) for v in control.agree_max(torch.tensor(ends, dtype=torch.int64), self._ranks).tolist()]


def _answer(reference: weakref.ref[OrderCheck]) -> str:
    check = reference()
    return "waits" if check is None else check._doing()


def _compose(texts: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return (
        "every rank must run the same modules in the same order at stage 3, and now they differ: "
        + "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())
        + ". For layers that only some ranks use, take stage 1 or 2"
    )
