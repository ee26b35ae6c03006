"""A power failure at any moment of a save leaves a checkpoint that loads; no returned save is lost.

The test records the library's system calls and derives what a disk may hold afterwards.
"""

# covers zero/_checkpoint/snapshot.py

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zero
from tests.lost_power import Change, Returned, disks, restore, watching


def _load(optimizer: zero.ZeroOptimizer, model: nn.Module, disk: dict[Path, bytes | None], root: Path, to: Path) -> int:
    """The step that is loaded from ``disk``; 0 if it has no checkpoint yet."""
    restore(disk, root, to)
    path, state = zero.load_checkpoint(optimizer, to / "new" / "saved")
    assert path is None or model.weight.unique().tolist() == [state["step"]]
    return int(state.get("step", 0))


def test_what_is_on_the_disk_when_the_power_fails_loads(tmp_path: Path) -> None:
    root, model = tmp_path / "disk", nn.Linear(3, 3, bias=False)
    root.mkdir()
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    with watching(root) as events:
        for step, tag in enumerate(("again", "again", "other"), 1):
            next(optimizer.master_pieces())[2].fill_(step)
            zero.save_checkpoint(optimizer, root / "new" / "saved", tag, client_state={"step": step})
            events.append(Returned(step))
    assert sum(isinstance(event, Change) and event.kind == "remove" for event in events) == 1, "the old shard"
    returned, seen = 0, dict[str, int]()
    for number, disk in disks(events):
        event = events[number]
        returned = event.step if isinstance(event, Returned) else returned
        key = repr(sorted(disk.items()))
        if key not in seen:
            seen[key] = _load(optimizer, model, disk, root, tmp_path / "after")
        assert returned <= seen[key] <= returned + 1, (events[max(number - 3, 0) : number + 1], sorted(disk))
    assert set(seen.values()) == {0, 1, 2, 3}
    optimizer.close()
