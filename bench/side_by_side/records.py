"""The record of a run, one JSON file in the results folder: losses, bytes, errors."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Key", "LibraryLog", "Record"]


@dataclass(frozen=True)
class Key:
    """The key of a run: equal keys give equal runs."""

    model: str
    configuration: str
    seed: int
    steps: int
    outlier_at: int | None = None

    def __str__(self) -> str:
        outlier = "" if self.outlier_at is None else f"-outlier{self.outlier_at}"
        return f"{self.model}-{self.steps}-{self.configuration}-seed{self.seed}{outlier}"

    def path(self, results: Path) -> Path:
        """Return the path of the run's file."""
        return results / f"{self}.json"


@dataclass
class Record:
    """The record of one run, finished or not."""

    key: Key
    command: str
    versions: str
    nodes_x_ranks: str
    numel: int = 0
    steps_done: int = 0
    train_losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean over the ranks and the steps since the last entry)."""
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    inter_nbytes: list[int] = field(default_factory=list)
    """Bytes that training steps (not evaluations) sent between nodes before each held-out loss."""
    inter_nbytes_per_step: int = 0
    """Bytes of the median step; steps after an evaluation do not count."""
    is_counted: bool = True
    """Whether bytes were counted; else they follow from a formula."""
    gradient_errors: list[tuple[int, float]] = field(default_factory=list)
    weight_errors: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    change_entropies: list[tuple[int, float]] = field(default_factory=list)
    """Of exact changes: zeroth-order entropy of a step's change of the rounded masters, in bits an element."""
    skipped_steps: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """The library's warnings, each once."""
    seconds: float = 0.0
    error: str = ""
    """Why the run ended early."""

    def write(self, results: Path) -> None:
        """Replace the file in the results folder atomically."""
        path = self.key.path(results)
        results.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.as_dict().items()]
        draft.write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")
        draft.replace(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """Make a record from :meth:`as_dict`'s result, also after a round trip through JSON."""
        return cls(**values | {"key": Key(**values["key"])})

    @classmethod
    def read(cls, key: Key, results: Path) -> Record | None:
        """Read the run's record; None if it has no file."""
        path = key.path(results)
        return cls.of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    @classmethod
    def all_in(cls, results: Path) -> list[Record]:
        """Read every record of the folder."""
        return [cls.of(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob("*-seed*.json"))]

    @property
    def is_finished(self) -> bool:
        """Whether all steps were run; runs that failed are tried again."""
        return not self.error and self.steps_done == self.key.steps

    def add_log(self, line: str) -> None:
        """Keep a line of the library's log."""
        line = f"step {self.steps_done}: {line}"
        if line not in self.log:
            self.log.append(line)


class LibraryLog(logging.Handler):
    """A logging handler that adds the library's warnings to a run's record."""

    def __init__(self, record: Record) -> None:
        super().__init__(logging.WARNING)
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        """Add the message to the run's record."""
        self._record.add_log(record.getMessage())

    def __enter__(self) -> LibraryLog:
        for name in ("zero", "zcomm"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("zero", "zcomm"):
            logging.getLogger(name).removeHandler(self)
