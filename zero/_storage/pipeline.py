"""Reading, updating and writing one unit after the other, with the moves of its neighbours under way meanwhile.

reads ahead      |read u+1      |
                 |update u      |      at most ``num_buffers`` units in memory
writes behind    |write u-1     |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar


class StagedUnit(Protocol):
    """A unit in memory, or on its way."""

    def wait(self) -> None:
        """Return once what was begun last, reading or writing, has ended."""

    def begin_write(self) -> None:
        """Begin to write."""

    def free(self) -> None:
        """Give the memory back; nothing is under way."""


Item = TypeVar("Item")
L = TypeVar("L", bound=StagedUnit)


class Pipeline(Generic[Item, L]):
    """Runs updates of units.

    Args:
        read: Begins to read a unit.
        num_buffers: Units in memory at a time, at least 1. With 1 nothing overlaps.
        reads_ahead: Read the next unit during an update.
        writes_behind: Write a unit during the next update.
    """

    def __init__(self, read: Callable[[Item], L], *, num_buffers: int, reads_ahead: bool, writes_behind: bool) -> None:
        self._read = read
        self._num_buffers = max(num_buffers, 1)
        self._reads_ahead, self._writes_behind = reads_ahead, writes_behind
        self._read_units: deque[L] = deque()
        self._written: deque[L] = deque()

    def run(self, items: Sequence[Item], update: Callable[[Item, L], None]) -> None:
        """Read, ``update`` and write every unit. When it returns, or raises, nothing is under way.

        Raises:
            Exception: The first error of a read, an update or a write.
        """
        try:
            for index, item in enumerate(items):
                if not self._read_units:
                    self._begin_read(item)
                if self._reads_ahead and index + 1 < len(items) and self._has_room(1 + len(self._read_units)):
                    self._begin_read(items[index + 1])
                self._read_units[0].wait()
                update(item, self._read_units[0])
                unit = self._read_units.popleft()
                self._written.append(unit)
                unit.begin_write()
                if not self._writes_behind:
                    self._end_writes(0)
            self._end_writes(0)
        finally:
            self._abandon()

    def _has_room(self, num_units: int) -> bool:
        """Whether so many units fit beside those that are being written, waiting for writes if need be."""
        if num_units > self._num_buffers:
            return False
        self._end_writes(self._num_buffers - num_units)
        return True

    def _begin_read(self, item: Item) -> None:
        self._end_writes(self._num_buffers - 1 - len(self._read_units))
        self._read_units.append(self._read(item))

    def _end_writes(self, num_left: int) -> None:
        while len(self._written) > max(num_left, 0):
            self._written[0].wait()
            self._written.popleft().free()

    def _abandon(self) -> None:
        """After an error: let what is under way end."""
        for unit in (*self._read_units, *self._written):
            with suppress(Exception):  # the first error is on its way already
                unit.wait()
            unit.free()
        self._read_units.clear()
        self._written.clear()
