"""A power failure at any moment of a save leaves a checkpoint that loads; no returned save is lost.

The test records the library's system calls and derives what a disk may hold afterwards: a file has the contents of its
last fsync, a folder the names that were synced with it, and of the unsynced names any one, all or none.
"""

# covers zero/_checkpoint/snapshot.py

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zero


class Change(NamedTuple):
    """A change of names: a file or folder created, a file renamed, a file deleted."""

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
        events.append(Change("rename", path, Path(os.fsdecode(args[1]))))
    elif event == "os.remove" and path.exists():
        events.append(Change("remove", path))


sys.addaudithook(_audit)


@contextmanager
def _watching(root: Path) -> Iterator[list[Event]]:
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
            tree[to] = tree.pop(path, contents.get(path, b""))
        elif kind == "file":
            tree[path] = contents.get(path, b"")
        elif kind == "folder":
            tree[path] = None
        elif kind == "remove":
            tree.pop(path, None)
    return tree


def _disks(events: list[Event]) -> Iterator[tuple[int, dict[Path, bytes | None]]]:
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
                first_name[event.to] = first_name.pop(event.path)
        elif isinstance(event, Synced) and event.data is None:
            ready = [change for change in pending if (change.to or change.path).parent == event.path]
            done += ready
            pending = [change for change in pending if change not in ready]
        elif isinstance(event, Synced) and event.data is not None:
            contents[first_name[event.path]] = event.data
        for extra in ([], pending, *([change] for change in pending)):
            yield number, _tree([*done, *extra], contents)


def _load(optimizer: zero.ZeroOptimizer, model: nn.Module, disk: dict[Path, bytes | None], root: Path, to: Path) -> int:
    """The step that is loaded from ``disk``; 0 if it has no checkpoint yet."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for path, data in sorted(disk.items()):  # folders before their contents
        if all(parent in disk for parent in path.parents if root in parent.parents):
            target = to / path.relative_to(root)
            target.mkdir() if data is None else target.write_bytes(data)
    path, state = zero.load_checkpoint(optimizer, to / "new" / "saved")
    assert path is None or model.weight.unique().tolist() == [state["step"]]
    return int(state.get("step", 0))


def test_what_is_on_the_disk_when_the_power_fails_loads(tmp_path: Path) -> None:
    root, model = tmp_path / "disk", nn.Linear(3, 3, bias=False)
    root.mkdir()
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    with _watching(root) as events:
        for step, tag in enumerate(("again", "again", "other"), 1):
            next(optimizer.master_pieces())[2].fill_(step)
            zero.save_checkpoint(optimizer, root / "new" / "saved", tag, client_state={"step": step})
            events.append(Returned(step))
    assert sum(isinstance(event, Change) and event.kind == "remove" for event in events) == 1, "the old shard"
    returned, seen = 0, dict[str, int]()
    for number, disk in _disks(events):
        event = events[number]
        returned = event.step if isinstance(event, Returned) else returned
        key = repr(sorted(disk.items()))
        if key not in seen:
            seen[key] = _load(optimizer, model, disk, root, tmp_path / "after")
        assert returned <= seen[key] <= returned + 1, (events[max(number - 3, 0) : number + 1], sorted(disk))
    assert set(seen.values()) == {0, 1, 2, 3}
    optimizer.close()
