"""What a disk may hold after a power failure, derived from the system calls of the library that were recorded.

A file has the contents of its last fsync, a folder the names that were synced with it, and of the unsynced names any
one, all or none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Change(NamedTuple):
    """A change of names: a file or folder created or renamed, a file deleted."""

    kind: str
    path: Path
    to: Path | None = None


class Synced(NamedTuple):
    """Durable now: the names in a folder, or the data of a file."""

    path: Path
    data: bytes | None


class Returned(NamedTuple):
    """The save of a step has returned."""

    step: int


Event = Change | Synced | Returned
NOTED: list[tuple[Path, list[Event]]] = []
"""The watched folder, and the events in it."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not NOTED or event not in ("open", "os.mkdir", "os.rename", "os.remove"):
        return
    root, events = NOTED[0]
    path = Path(os.fsdecode(args[0])) if isinstance(args[0], (str, bytes, os.PathLike)) else Path()
    if root not in path.parents:
        return
    if event == "open" and args[2] & os.O_CREAT and not path.exists():
        events.append(Change("file", path))
    elif event == "os.mkdir" and not path.exists():
        events.append(Change("folder", path))
    elif event == "os.rename":
        kind = "folder renamed" if path.is_dir() else "file renamed"
        events.append(Change(kind, path, Path(os.fsdecode(args[1]))))
    elif event == "os.remove" and path.exists():
        events.append(Change("remove", path))


sys.addaudithook(_audit)


@contextmanager
def watching(root: Path) -> Iterator[list[Event]]:
    events: list[Event] = []
    fsync = os.fsync

    def noted(number: int) -> None:
        fsync(number)
        path = Path(f"/proc/self/fd/{number}").readlink()
        events.append(Synced(path, path.read_bytes() if path.is_file() else None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        NOTED.append((root, events))
        try:
            yield events
        finally:
            NOTED.clear()


def _tree(changes: list[Change], contents: dict[Path, bytes]) -> dict[Path, bytes | None]:
    """The tree of a disk after these changes; folders have no bytes. ``contents``: of files, by their first names."""
    tree: dict[Path, bytes | None] = {}
    for kind, path, to in changes:
        if to is not None:  # also if the first name of the file was never durable
            tree[to] = tree.pop(path, None if kind == "folder renamed" else contents.get(path, b""))
            for inside in [name for name in tree if path in name.parents]:
                tree[to / inside.relative_to(path)] = tree.pop(inside)
        elif kind == "file":
            tree[path] = contents.get(path, b"")
        elif kind == "folder":
            tree[path] = None
        elif kind == "remove":
            tree.pop(path, None)
    return tree


def disks(events: list[Event]) -> Iterator[tuple[int, dict[Path, bytes | None]]]:
    """All states that the disk may be in when the power fails after so many events."""
    done: list[Change] = []
    pending: list[Change] = []
    contents: dict[Path, bytes] = {}
    first_name: dict[Path, Path] = {}
    for number, event in enumerate(events):
        if isinstance(event, Change):
            pending.append(event)
            if event.kind == "file":
                first_name[event.path] = event.path
                contents.pop(event.path, None)
            if event.to is not None:
                for path in [p for p in first_name if event.path in (p, *p.parents)]:
                    first_name[event.to / path.relative_to(event.path)] = first_name.pop(path)
        elif isinstance(event, Synced) and event.data is None:
            ready = [change for change in pending if (change.to or change.path).parent == event.path]
            done += ready
            pending = [change for change in pending if change not in ready]
        elif isinstance(event, Synced) and event.data is not None:
            contents[first_name[event.path]] = event.data
        for extra in ([], pending, *([change] for change in pending)):
            yield number, _tree([*done, *extra], contents)


def restore(disk: dict[Path, bytes | None], root: Path, to: Path) -> None:
    """Write the ``disk`` of ``root`` to folder ``to``, which is emptied before."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for path, data in sorted(disk.items()):  # folders before their contents
        if all(parent in disk for parent in path.parents if root in parent.parents):
            target = to / path.relative_to(root)
            target.mkdir() if data is None else target.write_bytes(data)
