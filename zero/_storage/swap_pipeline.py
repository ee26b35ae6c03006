"""Pipelined read, update and write of offloaded units: transfers of the neighbours overlap the update of one.

reads ahead      |read u+1      |
                 |update u      |      at most ``num_buffers`` units in memory
writes behind    |write u-1     |

``read`` may return a unit that is being read already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar


class StagedUnit(Protocol):
    """A unit in memory, or being read or written."""

    def wait(self) -> None:
        """Wait for the read or write that was started last."""

    def start_write(self) -> None:
        """Start writing."""

    def free(self) -> None:
        """Give the memory back; no transfer is in flight."""


Item = TypeVar("Item")
L = TypeVar("L", bound=StagedUnit)


class Pipeline(Generic[Item, L]):
    """Runs the updates of units.

    Args:
        read: Starts reading a unit.
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
        """Read, ``update`` and write every unit. When it returns or raises, no transfer is in flight.

        Raises:
            Exception: The first error of a read, an update or a write.
        """
        try:
            for index, item in enumerate(items):
                if not self._read_units:
                    self._start_read(item)
                if self._reads_ahead and index + 1 < len(items) and self._has_room(1 + len(self._read_units)):
                    self._start_read(items[index + 1])
                self._read_units[0].wait()
                update(item, self._read_units[0])
                unit = self._read_units.popleft()
                self._written.append(unit)
                unit.start_write()
                if not self._writes_behind:
                    self._end_writes(0)
            self._end_writes(0)
        finally:
            self._abandon()

    def _has_room(self, num_units: int) -> bool:
        """Whether ``num_units`` units fit into the buffers; waits for writes to make room."""
        if num_units > self._num_buffers:
            return False
        self._end_writes(self._num_buffers - num_units)
        return True

    def _start_read(self, item: Item) -> None:
        # Room first: a read without it would take a buffer beyond the limit.
        self._end_writes(self._num_buffers - 1 - len(self._read_units))
        self._read_units.append(self._read(item))

    def _end_writes(self, num_left: int) -> None:
        while len(self._written) > max(num_left, 0):
            self._written[0].wait()
            self._written.popleft().free()

    def _abandon(self) -> None:
        """Wait for the transfers that an error left in flight."""
        # A unit that is freed before its transfer ends would be handed out while the transfer still writes to it.
        for unit in (*self._read_units, *self._written):
            with suppress(Exception):  # the first error is already being raised
                unit.wait()
            unit.free()
        self._read_units.clear()
        self._written.clear()
