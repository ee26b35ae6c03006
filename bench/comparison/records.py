"""Store the measurements of a comparison in one JSON file, replaced after every measurement so that runs can resume.

{"context": {...}, "shape": {batch: {...}},
 "runs":   {"bfloat16 network 200mbit": {"running": "", "systems": {"zero++": {"seconds": [...], ...}}}},
 "memory": {"bfloat16 network": {"zero++": {"peak_mib": ..., "states_mib": ..., "base_mib": ...}}}}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["RANKS_PER_NODE", "Run", "Store", "System"]

RANKS_PER_NODE = 2
"""Unless a file's shape says otherwise."""


@dataclass
class System:
    """The measurements of one system on one network; lists have one entry for each round."""

    seconds: list[float] = field(default_factory=list)
    """Time of an optimizer step on the slowest rank, the mean over the steps of a round."""
    rounds: list[str] = field(default_factory=list)
    """The round of each, by the second in which its ranks started, and its number; missing in older files."""
    wire_nbytes: list[float] = field(default_factory=list)
    """Bytes that a node sends in a step, by its interface's counter, the mean over the nodes."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of a step, of all ranks together; not what the kernel does for the network in others' time."""
    caller_seconds: list[float] = field(default_factory=list)
    """That of the ranks' main threads, which run Python, forward and backward; missing in older files."""
    units: float | None = None
    """Bytes that zcomm counted between nodes in a step, in units of the bfloat16 model."""
    losses: dict[str, float] = field(default_factory=dict)
    """Losses by the number of steps, averaged over the ranks."""
    distance: float | None = None
    """From one process with the batches of all ranks, after the last step: of the weights, over how far they moved."""
    order_distance: float | None = None
    """That of one process with the sequences of each batch in the opposite order."""
    accumulation: int = 1
    error: str = ""

    @property
    def numbered(self) -> list[str]:
        """:attr:`rounds`; by the place in the list if the file has none, which is exact unless ranks were restarted."""
        return self.rounds if len(self.rounds) == len(self.seconds) else [str(n) for n in range(len(self.seconds))]


@dataclass
class Run:
    """All systems in one precision, with one batch, on one network."""

    running: str = ""
    """The system that runs now; written before it starts, so that it is known if the ranks die."""
    tokens: int = 0
    """Tokens of all ranks in a batch."""
    numel: int = 0
    systems: dict[str, System] = field(default_factory=dict)

    def unfinished(self, names: list[str], rounds: int) -> list[str]:
        """Return those of ``names`` that have rounds left and have not failed."""
        systems = {name: self.systems.get(name, System()) for name in names}
        return [name for name, system in systems.items() if not system.error and len(system.seconds) < rounds]


class Store:
    """The JSON file of a comparison."""

    def __init__(self, path: Path) -> None:
        """Read ``path`` if it exists."""
        self.path = path
        self.values: dict[str, Any] = {"context": {}, "shape": {}, "runs": {}, "memory": {}}
        if path.exists():
            self.values |= json.loads(path.read_text(encoding="utf-8"))

    def run(self, key: str) -> Run:
        """Return the record of a run; an empty one if there is none."""
        values = self.values["runs"].get(key, {})
        systems = {name: System(**system) for name, system in values.get("systems", {}).items()}
        return Run(**values | {"systems": systems})

    def keep(self, key: str, run: Run) -> None:
        """Add ``run`` and replace the file."""
        self.values["runs"][key] = asdict(run)
        self.write()

    def write(self) -> None:
        """Replace the file atomically: a reader sees the old content or the new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)

    def check_shape(self, batch: str, shape: dict[str, int]) -> None:
        """Raise ValueError if the file holds runs of another model or batch."""
        known = self.values["shape"].setdefault(batch, shape)
        if known != shape:
            raise ValueError(f"{self.path} holds runs of {known}, not {shape}: choose another --output")
