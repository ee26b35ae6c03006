"""Checkpoints to resume a run: one file for each rank, and one that commits them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from zcomm import Topology, control

__all__ = ["Checkpoints"]


class Checkpoints:
    """The latest checkpoint of one run.

    Args:
        folder: A folder for this run only, on a file system that all ranks share.
        topology: The ranks.
    """

    def __init__(self, folder: Path, topology: Topology) -> None:
        self._folder, self._topology = folder, topology

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save this rank's ``state`` after ``step`` steps. Collective; removes the previous checkpoint."""
        new = self._folder / str(step)
        new.mkdir(parents=True, exist_ok=True)
        torch.save(state, new / f"{self._topology.rank}.pt")
        self._wait()  # every file must exist before the commit
        if self._topology.rank == 0:
            draft = self._folder / "whole.new"
            draft.write_text(json.dumps({"step": step, "world_size": self._topology.world_size}))
            draft.replace(self._folder / "whole.json")
            for other in self._folder.iterdir():
                if other.is_dir() and other != new:
                    shutil.rmtree(other)
        self._wait()

    def load(self) -> dict[str, Any] | None:
        """Return this rank's latest state that all ranks have saved; None if there is none for this world size."""
        committed = self._folder / "whole.json"
        if not committed.exists():
            return None
        known = json.loads(committed.read_text())
        if known["world_size"] != self._topology.world_size:
            return None
        state: dict[str, Any] = torch.load(
            self._folder / str(known["step"]) / f"{self._topology.rank}.pt", weights_only=False
        )
        return state

    def remove(self) -> None:
        """Remove the checkpoint of a finished run. Collective."""
        self._wait()
        if self._topology.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        control.agree_max(torch.zeros(1), self._topology)
