"""One contiguous buffer for all saved inputs: it is allocated once and does not fragment memory.

the first tensor      number_checkpoints times the bytes of its checkpoint are allocated
the first step        if it needs more: what does not fit is allocated outside the buffer, and counted
when all is free      if more was needed at a time than the buffer holds, a buffer of that size replaces it

So number_checkpoints is a first guess, not a limit. Were it a limit, what does not fit would be allocated outside in
every step, and take the same memory in more pieces.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from zero._ranks.distributed import is_first_of_job
from zero._storage.poison import poison

logger = logging.getLogger("zero")
ALIGN = 64
"""Bytes; torch aligns its CPU allocations like this."""


class LiveCheckpoint:
    """Alive while any slot of one checkpoint is: the arena counts these objects by weak references."""

    __slots__ = ("__weakref__",)


class ArenaSpan(NamedTuple):
    start: int
    stop: int


class Arena:
    """A buffer for saved inputs that grows between steps to what a step needs.

    Args:
        num_checkpoints: Checkpoints that it is first allocated for; None: allocated after the first step.
        device: Of the buffer.
        is_pinned: Whether its memory is page-locked.
    """

    def __init__(self, num_checkpoints: int | None, device: torch.device, *, is_pinned: bool) -> None:
        self._num_checkpoints, self._device, self._is_pinned = num_checkpoints, device, is_pinned
        self._memory: Tensor | None = None
        self._free: list[ArenaSpan] = []
        self._live: WeakSet[LiveCheckpoint] = WeakSet()
        self.dropped: deque[tuple[ArenaSpan | None, int]] = deque()
        """Spans and bytes of slots that are gone. A garbage collection may drop a slot at any place of this code."""
        self._used = self._most_used = 0
        self._warns = True
        self.num_allocations = 0

    @property
    def nbytes(self) -> int:
        self._free_dropped()
        return 0 if self._memory is None else self._memory.numel()

    def start_checkpoint(self, nbytes: int) -> LiveCheckpoint:
        """Count one more checkpoint, of ``nbytes`` in all; warn once if there are more than ``num_checkpoints``."""
        self._free_dropped()
        if self._num_checkpoints is not None:
            if len(self._live) == self._num_checkpoints and self._warns:
                self._warns = False
                if is_first_of_job():
                    logger.warning(
                        "more than number_checkpoints=%d activation checkpoints are stored at a time: the contiguous "
                        "buffer grows to hold them all",
                        self._num_checkpoints,
                    )
            if self._memory is None:
                self._allocate_buffer(self._num_checkpoints * _aligned(nbytes))
        checkpoint = LiveCheckpoint()
        self._live.add(checkpoint)
        return checkpoint

    def allocate(self, nbytes: int, checkpoint: LiveCheckpoint) -> ArenaSlot:
        """A slot of ``nbytes``: in the first free span that is large enough; without memory if none is."""
        self._free_dropped()
        nbytes = _aligned(nbytes)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[index : index + 1] = [ArenaSpan(start + nbytes, stop)] if stop - start > nbytes else []
                return ArenaSlot(self, ArenaSpan(start, start + nbytes), checkpoint)
        return ArenaSlot(self, None, checkpoint, nbytes)

    def view(self, span: ArenaSpan) -> Tensor:
        """The bytes of ``span``.

        A view of ``.data`` has a version counter of its own. With a plain view, writing one slot would raise the
        version of all others, and autograd would report them as modified in place.
        """
        assert self._memory is not None, "a slot of an arena without memory"
        return self._memory.data[span.start : span.stop]

    def count(self, nbytes: int) -> None:
        self._used += nbytes
        self._most_used = max(self._most_used, self._used)

    def _free_dropped(self) -> None:
        while self.dropped:
            self._free_slot(*self.dropped.popleft())

    def _free_slot(self, span: ArenaSpan | None, nbytes: int) -> None:
        self._used -= nbytes
        if span is not None:
            # On CUDA a copy on another stream may still be reading the slot, and would read the fill. Reuse is safe:
            # copies of one device run in one order, so the next copy into this slot comes after that read.
            if not torch.cuda.is_available():
                poison(self.view(span))
            insort(self._free, span)
            merged: list[ArenaSpan] = []
            for piece in self._free:
                if merged and merged[-1].stop == piece.start:
                    merged[-1] = ArenaSpan(merged[-1].start, piece.stop)
                else:
                    merged.append(piece)
            self._free = merged
        if self._used == 0 and (self._memory is None or self._most_used > self._memory.numel()):
            # Nothing points into the old buffer any more, so it can be replaced. Out of memory is no error: what does
            # not fit is allocated outside, as in the first step.
            with suppress(RuntimeError):
                self._allocate_buffer(self._most_used)

    def _allocate_buffer(self, nbytes: int) -> None:
        self._memory, self._free = None, []  # first freed, or both buffers would be in memory at once
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._is_pinned)
        self._free = [ArenaSpan(0, nbytes)]
        self.num_allocations += 1


class ArenaSlot:
    """A span of an arena, freed when this object is dropped. ``memory`` is None if no free span was large enough."""

    __slots__ = ("_arena", "_checkpoint", "_nbytes", "_span", "memory")

    def __init__(self, arena: Arena, span: ArenaSpan | None, checkpoint: LiveCheckpoint, nbytes: int = 0) -> None:
        self._arena, self._span, self._checkpoint = arena, span, checkpoint
        self._nbytes = nbytes if span is None else span.stop - span.start
        self.memory = None if span is None else arena.view(span)
        arena.count(self._nbytes)

    def __del__(self) -> None:
        self.memory = None  # the view goes first: the arena may replace the buffer that it points into
        self._arena.dropped.append((self._span, self._nbytes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
