"""Host buffers between files and exchanges: what is read ahead, what is being sent, what is being written.

    expect --read ahead--> take --> sent by an exchange --> give
    buffer --filled by an update--> write --> free again when it is in the file

Invariants:
    B1  What is read ahead has at most ``limit_nbytes``, but for the next part, and as much may be on its way to files.
    B2  A part is read after what was written of it is in the file.
    B3  A read that fails gives NaNs: the exchange it is for takes place on every rank. The error is kept until the
        ranks agree on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from zero._storage.file_store import FileStore, StoredFile, Transfer


class PageRange(NamedTuple):
    """Whole pages of a file that move as one."""

    file: StoredFile
    offset: int
    nbytes: int


class _Moving(NamedTuple):
    transfer: Transfer
    buffer: Tensor


class StagingBuffers:
    """The buffers of one store.

    Args:
        store: Where the files are.
        limit_nbytes: See B1.
    """

    def __init__(self, store: FileStore, limit_nbytes: int) -> None:
        self.store, self.limit_nbytes = store, limit_nbytes
        self.error: Exception | None = None
        """The first that no rank has been told of yet."""
        self.has_fetched = False
        """Whether an exchange has sent what was in a file since the ranks agreed last."""
        self._reads: dict[PageRange, _Moving] = {}
        self._dropped: list[_Moving] = []
        """Reads that nobody wants any more."""
        self._writes: dict[PageRange, _Moving] = {}
        """In the order in which they began."""
        self._lent: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        """Buffers that copies to the device still read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.store.buffers.nbytes

    def expect(self, parts: Iterable[PageRange]) -> None:
        """These will be taken next, in this order: read them as far as the limit goes, and forget other reads."""
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
        """Forget what was read of ``part``: it changes, or is not needed."""
        moving = self._reads.pop(part, None)
        if moving is not None:
            self._dropped.append(moving)

    def _read(self, part: PageRange) -> None:
        self._settle(part)
        try:
            buffer = self.buffer(part.nbytes)
            self._reads[part] = _Moving(self.store.read(part.file, part.offset, buffer), buffer)
        except (OSError, MemoryError) as error:
            self._fail(error)

    def take(self, part: PageRange) -> Tensor | None:
        """What is in the file, in a buffer to be given back; None if it could not be read (B3)."""
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
        """A buffer, uint8; waits for writes if too much is on its way (B1).

        Raises:
            MemoryError: There is no host memory for it.
        """
        self._reclaim()
        while self._writes and sum(w.buffer.numel() for w in self._writes.values()) + nbytes > self.limit_nbytes:
            self._settle(next(iter(self._writes)))
        return self.store.buffer(nbytes)

    def give(self, buffer: Tensor, event: torch.cuda.Event | None = None) -> None:
        """Take a buffer back; ``event``: once that has passed."""
        if event is None:
            self.store.give(buffer)
        else:
            self._lent.append((event, buffer))

    def _reclaim(self) -> None:
        while self._lent and self._lent[0][0].query():  # type: ignore[no-untyped-call]
            self.store.give(self._lent.popleft()[1])
        for moving in [m for m in self._dropped if m.transfer.is_done]:
            self._dropped = [m for m in self._dropped if m is not moving]
            self._end(moving, is_wanted=False)

    def write(self, part: PageRange, buffer: Tensor) -> None:
        """Begin to write ``buffer``, which is free again once it is in the file."""
        self.drop(part)
        self._settle(part)
        while self._dropped:  # of this file, maybe
            self._end(self._dropped.pop(), is_wanted=False)
        try:
            self._writes[part] = _Moving(self.store.write(part.file, part.offset, buffer), buffer)
        except OSError as error:
            self._fail(error)
            self.store.give(buffer)

    def _settle(self, part: PageRange) -> None:
        """Wait until what was written of ``part`` is in the file."""
        moving = self._writes.pop(part, None)
        if moving is not None:
            self._end(moving, is_wanted=True)

    def _end(self, moving: _Moving, *, is_wanted: bool) -> None:
        try:
            moving.transfer.wait()
        except OSError as error:
            if is_wanted:
                self._fail(error)
        self.store.give(moving.buffer)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error

    def flush(self) -> None:
        """Wait until all that was written is in the files."""
        while self._writes:
            self._settle(next(iter(self._writes)))

    def raise_error(self) -> None:
        """Raise the first error since the last call, if there was one."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Give up everything that is read ahead, and wait for all writes."""
        self.expect(())
        self.flush()
        while self._dropped:
            self._end(self._dropped.pop(), is_wanted=False)
        while self._lent:
            event, buffer = self._lent.popleft()
            event.synchronize()
            self.store.give(buffer)
