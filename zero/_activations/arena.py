"""One buffer for all saved inputs, so that they neither fragment memory nor are allocated again.

the first tensor      number_checkpoints times the bytes of its checkpoint are allocated
the first step        more is needed: what does not fit is kept outside, and is counted
when all is free      the buffer is allocated anew, as large as what was needed at a time, if that was more

So number_checkpoints says how much the first step finds, not how much there may be: what did not fit would be allocated
anew in every step, and take the same memory in more pieces.
"""

from __future__ import annotations

import logging
from bisect import insort
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from zero._ranks.distributed import is_first_of_job
from zero._storage.poison import poison

logger = logging.getLogger("zero")
ALIGN = 64
"""Bytes: as torch aligns what it allocates on the CPU."""


class Ticket:
    """One checkpoint's right to room; ends with the last of its slots."""

    __slots__ = ("__weakref__",)


class ArenaSpan(NamedTuple):
    """Bytes of the buffer."""

    start: int
    stop: int


class Arena:
    """The buffer.

    Args:
        num_checkpoints: How many it is made for before the first step; None: its size is known after that.
        device: Where it is.
        is_pinned: Whether its memory is page-locked.
    """

    def __init__(self, num_checkpoints: int | None, device: torch.device, *, is_pinned: bool) -> None:
        self._num_checkpoints, self._device, self._is_pinned = num_checkpoints, device, is_pinned
        self._memory: Tensor | None = None
        self._free: list[ArenaSpan] = []
        self._tickets: WeakSet[Ticket] = WeakSet()
        self._used = self._most_used = 0
        self._says = True
        self.num_allocations = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._memory is None else self._memory.numel()

    def admit(self, nbytes: int) -> Ticket:
        """One more checkpoint, of ``nbytes`` in all. That there are more than was said is logged once."""
        if self._num_checkpoints is not None:
            if len(self._tickets) == self._num_checkpoints and self._says:
                self._says = False
                if is_first_of_job():
                    logger.warning(
                        "more than number_checkpoints=%d activation checkpoints are held at a time: the contiguous "
                        "buffer grows to hold them all",
                        self._num_checkpoints,
                    )
            if self._memory is None:
                self._allocate(self._num_checkpoints * _aligned(nbytes))
        ticket = Ticket()
        self._tickets.add(ticket)
        return ticket

    def take(self, nbytes: int, ticket: Ticket) -> ArenaSlot:
        """Room for ``nbytes``; without memory if there is none left, for now."""
        nbytes = _aligned(nbytes)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[index : index + 1] = [ArenaSpan(start + nbytes, stop)] if stop - start > nbytes else []
                return ArenaSlot(self, ArenaSpan(start, start + nbytes), ticket)
        return ArenaSlot(self, None, ticket, nbytes)

    def view(self, place: ArenaSpan) -> Tensor:
        """The bytes there. Aliases have versions of their own: writing one slot modifies no other."""
        assert self._memory is not None, "a slot of an arena without memory"
        return self._memory.data[place.start : place.stop]

    def use(self, nbytes: int) -> None:
        """So many bytes more are needed."""
        self._used += nbytes
        self._most_used = max(self._most_used, self._used)

    def give(self, place: ArenaSpan | None, nbytes: int) -> None:
        """Take room back."""
        self._used -= nbytes
        if place is not None:
            if not torch.cuda.is_available():  # there a copy may still be reading: the next comes after it
                poison(self.view(place))
            insort(self._free, place)
            merged: list[ArenaSpan] = []
            for piece in self._free:
                if merged and merged[-1].stop == piece.start:
                    merged[-1] = ArenaSpan(merged[-1].start, piece.stop)
                else:
                    merged.append(piece)
            self._free = merged
        if self._used == 0 and self._most_used > self.nbytes:
            with suppress(RuntimeError):  # out of memory: what does not fit stays outside
                self._allocate(self._most_used)

    def _allocate(self, nbytes: int) -> None:
        self._memory, self._free = None, []
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._is_pinned)
        self._free = [ArenaSpan(0, nbytes)]
        self.num_allocations += 1


class ArenaSlot:
    """Room in an arena, given back when this object is dropped. ``memory`` is None if there was none left."""

    __slots__ = ("_arena", "_nbytes", "_place", "_ticket", "memory")

    def __init__(self, arena: Arena, place: ArenaSpan | None, ticket: Ticket, nbytes: int = 0) -> None:
        self._arena, self._place, self._ticket = arena, place, ticket
        self._nbytes = nbytes if place is None else place.stop - place.start
        self.memory = None if place is None else arena.view(place)
        arena.use(self._nbytes)

    def __del__(self) -> None:
        self.memory = None
        self._arena.give(self._place, self._nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
