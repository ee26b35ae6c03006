"""A folder of this process alone, which goes with it: a later process removes what a dead one left.

    parent/NAME/owner    host, boot, process number and its start time; locked while the process lives

A folder is left behind if the process was killed. It is removed by the next claim below the same parent, if its owner
ran on this host, is gone, and holds the lock no more. Folders of other hosts are never touched.
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


class _ProcessIdentity(NamedTuple):
    """A process, told apart from later ones of the same number."""

    host: str
    boot: str
    pid: int
    start_time: str

    @staticmethod
    def current() -> _ProcessIdentity:
        return _ProcessIdentity(socket.gethostname(), _boot(), os.getpid(), _start_time(os.getpid()))

    def is_of_this_host(self) -> bool:
        return self.boot == _boot() or self.host == socket.gethostname()

    def is_alive(self) -> bool:
        return self.boot == _boot() and _start_time(self.pid) == self.start_time


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> str:
    """Since boot, in ticks of the kernel; empty if there is no such process, or it is dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold blanks
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class ClaimedFolder:
    """``parent/zero-NAME``, of this process. Not for use in a process forked later.

    Raises:
        OSError: With the path: the parent is missing or no folder, cannot be written, or has a folder of this name.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / f"{PREFIX}{name}"
        self._owner = -1
        self._pid = os.getpid()
        with _locked(parent):
            _remove_dead(parent)
            self.path.mkdir(mode=0o700)
            try:
                self._claim()
            except BaseException:
                self.remove()
                raise

    def _claim(self) -> None:
        self._owner = os.open(self.path / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _try_lock(self._owner)
        os.write(self._owner, json.dumps(_ProcessIdentity.current()._asdict()).encode())

    def remove(self) -> None:
        """Remove the folder with all that is in it. In a forked process, and again: nothing."""
        if os.getpid() != self._pid:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that of the processes of this host one at a time claims and cleans there."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: claims have names of their own all the same
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _try_lock(number: int) -> bool:
    """Whether nobody else holds the lock of an open file; then this process does until it closes it or ends."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here: the process number must do
        return True
    return True


def _read_owner(number: int) -> _ProcessIdentity | None:
    """What an open file says; None if another user wrote it, who shares the disk, or it is no such file."""
    status = os.fstat(number)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        return None
    said = json.loads(os.read(number, 4096))
    if not isinstance(said["pid"], int):  # names a file below /proc
        return None
    return _ProcessIdentity(**said)


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):  # of another kind: let it be
            number = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                owner = _read_owner(number)
                if owner is not None and owner.is_of_this_host() and not owner.is_alive() and _try_lock(number):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(number)
