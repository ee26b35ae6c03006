"""A temporary folder owned by one process; a later process removes the folders of dead ones.

    parent/NAME/owner    host, boot id, pid and the process's start time; locked while the process lives

A killed process leaves its folder behind. The next claim below the same parent removes it, if its owner ran on this
host, is dead, and no longer holds the lock. Folders of other hosts are never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PREFIX = "zero-"
OWNER = "owner"


class ProcessIdentity(NamedTuple):
    """A process, distinct from later ones with the same pid."""

    host: str
    boot: str
    pid: int
    start_time: str

    @staticmethod
    def current() -> ProcessIdentity:
        return ProcessIdentity(socket.gethostname(), _boot(), os.getpid(), _start_time(os.getpid()))

    def is_of_this_host(self) -> bool:
        return self.boot == _boot() or self.host == socket.gethostname()

    def is_alive(self) -> bool:
        return self.boot == _boot() and _start_time(self.pid) == self.start_time


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> str:
    """Start time in kernel ticks since boot; empty if there is no such process, or it is a zombie."""
    try:
        # The process's name, in parentheses, may have blanks in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class ClaimedFolder:
    """``parent/zero-NAME``, owned by this process. A process forked later must not use it.

    Raises:
        OSError: With the path: the parent is missing, not a folder or not writable, or has a folder of this name.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / f"{PREFIX}{name}"
        self._owner = -1
        self._pid = os.getpid()
        # One process at a time: no other may look at the folder between mkdir and a complete owner file. Without locks
        # the names of folders are unique all the same.
        with locked(parent):
            _remove_dead(parent)
            self.path.mkdir(mode=0o700)
            try:
                self._owner = os.open(self.path / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try_lock(self._owner)
                os.write(self._owner, json.dumps(ProcessIdentity.current()._asdict()).encode())
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Remove the folder and its contents. Does nothing in a forked process, or when called again."""
        if os.getpid() != self._pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``: threads and processes of this host that ask for it go one after the other."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def try_lock(number: int) -> bool:
    """Try to lock an open file; False: it is taken. The lock is held until the file is closed or the process ends."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: pid and start time must do
        return True
    return True


def _read_owner(number: int) -> ProcessIdentity | None:
    """Parse an open owner file; None if another user of the disk wrote it, or it is not a regular file."""
    status = os.fstat(number)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        return None
    fields = json.loads(os.read(number, 4096))
    if not isinstance(fields["pid"], int):  # it becomes part of a path below /proc
        return None
    return ProcessIdentity(**fields)


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        # What raises one of these is no owner file of ours, and is left.
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            number = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                owner = _read_owner(number)
                if owner is not None and owner.is_of_this_host() and not owner.is_alive() and try_lock(number):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(number)
