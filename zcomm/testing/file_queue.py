"""The queue of offloaded files on the virtual clock: a transfer happens at a moment that the seed decides.

The files are real ones, read and written by the library's own queue. Until its moment a transfer has done nothing: a
buffer that is reused too early is written with its new contents, or read over.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from zcomm._kernels import kernels
from zcomm.testing.scheduler import Scheduler

PAGE = 4096
SECONDS = (1e-5, 5e-3)
"""The shortest and the longest transfer."""
_native_file_queue = kernels.file_queue


class SimulatedFileQueue:
    """As the native ``FileQueue``, of one rank.

    Args:
        scheduler: That of the simulation.
        fail_after: By rank: after so many events files can neither be created nor written.
        native: The library's own queue.
    """

    def __init__(self, scheduler: Scheduler, fail_after: Mapping[int, int], native: Any) -> None:
        self._scheduler, self._fail_after, self._native = scheduler, fail_after, native
        self._rank = scheduler.current.rank
        self._outcomes: dict[int, list[OSError | None]] = {}
        """By ticket: empty until the transfer has happened."""
        self._damaged: set[tuple[int, int]] = set()
        """Files and pages whose last write has failed."""
        self.engine = native.engine
        self.open, self.size, self.sync, self.close = native.open, native.size, native.sync, native.close

    def create(self, path: str, nbytes: int, **checks: bool) -> int:
        """A new file."""
        if self._fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return int(self._native.create(path, nbytes, **checks))

    @property
    def _fails(self) -> bool:
        return self._scheduler.num_events > self._fail_after.get(self._rank, sys.maxsize)

    def _start(self, verb: str, file: int, offset: int, ptr: int, nbytes: int) -> int:
        ticket = len(self._outcomes) + 1
        outcome = self._outcomes[ticket] = []

        def happen() -> None:
            if self._scheduler.main_task(self._rank).stop is not None:  # killed: its memory may be gone
                return
            outcome.append(self._transfer(verb, file, offset, ptr, nbytes))
            self._scheduler.note(f"{verb} {ticket}")

        self._scheduler.after(self._scheduler.value(*SECONDS), happen)
        return ticket

    def _transfer(self, verb: str, file: int, offset: int, ptr: int, nbytes: int) -> OSError | None:
        pages = {(file, page) for page in range(offset // PAGE, (offset + nbytes) // PAGE)}
        if verb == "read" and pages & self._damaged:
            return OSError(errno.EBADMSG, "checksum mismatch after a write that failed")
        if verb == "write" and self._fails:
            self._damaged |= pages
            return OSError(errno.EIO, os.strerror(errno.EIO))
        try:
            self._native.wait(getattr(self._native, verb)(file, offset, ptr, nbytes))
        except OSError as error:
            return error
        if verb == "write":
            self._damaged -= pages
        return None

    def read(self, *args: int) -> int:
        """Begin a transfer; returns its ticket."""
        return self._start("read", *args)

    def write(self, *args: int) -> int:
        """Begin a transfer; returns its ticket."""
        return self._start("write", *args)

    def is_done(self, ticket: int) -> bool:
        """Whether the transfer has happened."""
        return bool(self._outcomes[ticket])

    def wait(self, ticket: int) -> None:
        """Return once it has; raise its error."""
        if not self.is_done(ticket) and self._scheduler.is_inside:
            self._scheduler.wait(partial(self.is_done, ticket), None, "a transfer of a file", in_c=True)
        for error in self._outcomes[ticket]:  # none where a killed rank's store is collected after the simulation
            if error is not None:
                raise error


def simulated_file_queue(
    scheduler: Scheduler, fail_after: Mapping[int, int], num_requests: int, request_nbytes: int
) -> SimulatedFileQueue:
    """In place of :func:`zcomm._kernels.kernels.file_queue`."""
    return SimulatedFileQueue(scheduler, fail_after, _native_file_queue(num_requests, request_nbytes))
