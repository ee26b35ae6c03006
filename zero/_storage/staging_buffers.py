"""Staging buffers: host memory between files and exchanges, for parts that are read ahead, sent or written.

    read_ahead --> take --> sent by an exchange --> give
    buffer --filled by an update--> write --> free again when it is in the file

Invariants:
    B1  At most ``limit_nbytes`` are read ahead, but always the next part; at most as much is being written.
    B2  A part is read only after all writes of it have completed.
    B3  A failed read gives NaN, so that its exchange takes place on every rank: a rank that raised instead would leave
        the others in a deadlock. The error is kept until the ranks agree on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from zero._storage.file_store import FileStore, StoredFile, Transfer


class PageRange(NamedTuple):
    """Whole pages of a file that are transferred together."""

    file: StoredFile
    offset: int
    nbytes: int


class _StagedTransfer(NamedTuple):
    transfer: Transfer
    buffer: Tensor


class StagingBuffers:
    """The buffers of one store.

    Args:
        store: The files.
        limit_nbytes: See B1.
    """

    def __init__(self, store: FileStore, limit_nbytes: int) -> None:
        self.store, self.limit_nbytes = store, limit_nbytes
        self.error: Exception | None = None
        """The first error that was not raised yet."""
        self.has_fetched = False
        """Whether an exchange has sent values from a file since the ranks agreed last."""
        self._reads: dict[PageRange, _StagedTransfer] = {}
        self._dropped: list[_StagedTransfer] = []
        """Reads in flight whose values are no longer needed."""
        self._writes: dict[PageRange, _StagedTransfer] = {}
        """Writes in flight, oldest first."""
        self._lent: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        """Buffers that copies to the device may still read, each with the event that ends the copy."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.store.buffers.nbytes

    def read_ahead(self, parts: Iterable[PageRange]) -> None:
        """Start reading ``parts``, which will be taken in this order, up to the limit; drop other reads."""
        nbytes = 0
        wanted: set[PageRange] = set()
        for part in parts:
            nbytes += part.nbytes
            if wanted and nbytes > self.limit_nbytes:
                break
            wanted.add(part)
            if part not in self._reads:
                self._read(part)
        for part in self._reads.keys() - wanted:
            self.drop(part)

    def drop(self, part: PageRange) -> None:
        """Drop what was read of ``part``: it has changed, or is not needed."""
        moving = self._reads.pop(part, None)
        if moving is not None:
            self._dropped.append(moving)

    def _read(self, part: PageRange) -> None:
        self._finish_write(part)  # B2
        try:
            buffer = self.buffer(part.nbytes)
            self._reads[part] = _StagedTransfer(self.store.read(part.file, part.offset, buffer), buffer)
        except (OSError, MemoryError) as error:
            self._fail(error)

    def take(self, part: PageRange) -> Tensor | None:
        """The values of ``part`` in a buffer, which the caller gives back; None if the read failed (B3)."""
        if part not in self._reads:
            self._read(part)
        moving = self._reads.pop(part, None)
        if moving is None:
            return None
        try:
            moving.transfer.wait()
        except OSError as error:
            self._fail(error)
            self.store.give(moving.buffer)
            return None
        return moving.buffer

    def buffer(self, nbytes: int) -> Tensor:
        """A uint8 buffer; waits for writes in flight if they exceed the limit (B1).

        Raises:
            MemoryError: There is not enough host memory.
        """
        self._reclaim()
        while self._writes and sum(w.buffer.numel() for w in self._writes.values()) + nbytes > self.limit_nbytes:
            self._finish_write(next(iter(self._writes)))
        return self.store.buffer(nbytes)

    def give(self, buffer: Tensor, event: torch.cuda.Event | None = None) -> None:
        """Take a buffer back; with ``event``, only once that has completed: a copy reads the buffer until then."""
        if event is None:
            self.store.give(buffer)
        else:
            self._lent.append((event, buffer))

    def _reclaim(self) -> None:
        """Free the buffers of completed copies and dropped reads, without waiting."""
        while self._lent and self._lent[0][0].query():  # type: ignore[no-untyped-call]
            self.store.give(self._lent.popleft()[1])
        for moving in [m for m in self._dropped if m.transfer.is_done]:
            self._dropped = [m for m in self._dropped if m is not moving]
            self._end(moving, is_wanted=False)

    def write(self, part: PageRange, buffer: Tensor) -> None:
        """Start writing ``buffer``, which is free again once it is in the file."""
        self.drop(part)
        self._finish_write(part)
        while self._dropped:  # a read of the same pages may be in flight; it must not overlap the write
            self._end(self._dropped.pop(), is_wanted=False)
        try:
            self._writes[part] = _StagedTransfer(self.store.write(part.file, part.offset, buffer), buffer)
        except OSError as error:
            self._fail(error)
            self.store.give(buffer)

    def _finish_write(self, part: PageRange) -> None:
        """Wait for the write of ``part``, if one is in flight."""
        moving = self._writes.pop(part, None)
        if moving is not None:
            self._end(moving, is_wanted=True)

    def _end(self, moving: _StagedTransfer, *, is_wanted: bool) -> None:
        try:
            moving.transfer.wait()
        except OSError as error:
            if is_wanted:
                self._fail(error)
        self.store.give(moving.buffer)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error

    def flush(self) -> None:
        """Wait for all writes."""
        while self._writes:
            self._finish_write(next(iter(self._writes)))

    def raise_error(self) -> None:
        """Raise the first error since the last call, if there was one."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Drop all reads, and wait for all transfers and copies."""
        self.read_ahead(())
        self.flush()
        while self._dropped:
            self._end(self._dropped.pop(), is_wanted=False)
        while self._lent:
            event, buffer = self._lent.popleft()
            event.synchronize()
            self.store.give(buffer)
