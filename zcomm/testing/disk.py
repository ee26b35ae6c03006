"""A disk that may lose its power after any event: what ranks write below a folder, and what is left of it afterwards.

    files written, renamed, deleted below the folder --> events, each a point where other ranks may run
    power failure: of names that were not synced, any may be there or not; of data that was not synced, a part

What is durable: the names in a folder as of its last fsync, and the data of a file as of its own last fsync.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcomm.testing.scheduler import Scheduler

_DISKS: list[SimulatedDisk] = []
"""The disk of the simulation that runs: Python keeps an audit hook for good, so there is one for all disks."""


@dataclass(eq=False, slots=True)
class _File:
    """A file, under whatever name; folders have no data."""

    is_folder: bool
    synced: bytes = b""


@dataclass(eq=False)
class SimulatedDisk:
    """The files below ``root``, a real folder, of one simulation.

    Args:
        root: An empty folder.
        scheduler: That of the simulation.
    """

    root: Path
    scheduler: Scheduler
    full_after: dict[int, int] = field(default_factory=dict)
    """By rank: after so many events of the job its disk is full, and files and folders cannot be created."""
    fails_at: tuple[int, Callable[[], None]] | None = None
    """Of the events below the folder, counted from 1: the call that comes before it, such as a power failure."""
    num_events: int = 0
    """Those below the folder so far: files created, renamed, deleted, synced."""
    _durable: dict[Path, _File] = field(default_factory=dict)
    _now: dict[Path, _File] = field(default_factory=dict)
    _pending: list[tuple[Path, Path, _File | None]] = field(default_factory=list)
    """Changes of names that are not synced: the folder, the name, and what it stands for from then on."""

    @contextmanager
    def recording(self) -> Iterator[SimulatedDisk]:
        """Inside, events below the folder are recorded."""
        if not _IS_HOOKED:
            sys.addaudithook(_audit)
            _IS_HOOKED.append(True)
        fsync = os.fsync

        def synced(number: Any, /) -> None:
            descriptor = number if isinstance(number, int) else number.fileno()
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            is_below = self.root == path or self.root in path.parents
            if is_below:
                self._event("fsync")
            fsync(number)
            if is_below:
                self._synced(path)

        os.fsync = synced  # type: ignore[assignment]
        _DISKS.append(self)
        try:
            yield self
        finally:
            _DISKS.remove(self)
            os.fsync = fsync

    def _event(self, what: str) -> None:
        """Something is about to happen: before it other ranks may run, or the power may fail."""
        self.num_events += 1
        if self.fails_at is not None and self.num_events >= self.fails_at[0]:
            self.scheduler.at[self.scheduler.num_events] = self.fails_at[1]
            self.fails_at = None
        self.scheduler.pause(what)

    def _changes(self, event: str, path: Path, to: Path | None) -> None:
        """A name below the folder is about to change."""
        self._event(event)
        full_after = self.full_after.get(self.scheduler.current.rank, sys.maxsize)
        if event in ("open", "os.mkdir") and self.scheduler.num_events > full_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if event == "os.rename" and to is not None:
            file = self._now.pop(path, None) or _File(is_folder=path.is_dir())
            self._set(path, None)
            self._set(to, file)
        elif event == "os.remove":
            if path.exists():
                self._set(path, None)
        elif not path.exists():
            self._set(path, _File(is_folder=event == "os.mkdir"))

    def _set(self, path: Path, file: _File | None) -> None:
        if file is None:
            self._now.pop(path, None)
        else:
            self._now[path] = file
        self._pending.append((path.parent, path, file))

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            for change in [change for change in self._pending if change[0] == path]:
                self._apply(self._durable, change)
                self._pending.remove(change)
        elif path in self._now:
            self._now[path].synced = path.read_bytes()

    @staticmethod
    def _apply(names: dict[Path, _File], change: tuple[Path, Path, _File | None]) -> None:
        _, path, file = change
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file

    def left_after_power_failure(self, rng: random.Random, to: Path) -> None:
        """Write what may be left on the disk into the empty folder ``to``; ``rng`` decides what was not synced."""
        names = dict(self._durable)
        for change in self._pending:
            if rng.random() < 0.5:
                self._apply(names, change)
        for path in sorted(names):  # folders before what is in them
            target = to / path.relative_to(self.root)
            if not target.parent.is_dir():
                continue  # its folder is lost
            if names[path].is_folder:
                target.mkdir()
            else:
                target.write_bytes(self._torn(path, names[path], rng))

    def _torn(self, path: Path, file: _File, rng: random.Random) -> bytes:
        if self._now.get(path) is not file or not path.is_file():
            return file.synced
        written = path.read_bytes()
        if written == file.synced or rng.random() < 0.5:
            return file.synced
        return written[: rng.randrange(len(written) + 1)]


_IS_HOOKED: list[bool] = []
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _DISKS or event not in WATCHED or not isinstance(args[0], (str, bytes, os.PathLike)):
        return
    disk, path = _DISKS[-1], Path(os.fsdecode(args[0]))
    is_created = event != "open" or (isinstance(args[2], int) and args[2] & os.O_CREAT)
    if is_created and disk.root in path.parents:
        disk._changes(event, path, Path(os.fsdecode(args[1])) if event == "os.rename" else None)
