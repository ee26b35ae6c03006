"""What a run has reached and cost: one JSON file a run, in the results folder."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Key", "LibraryLog", "Record"]


@dataclass(frozen=True)
class Key:
    """What a run is: the same key gives the same run."""

    model: str
    configuration: str
    seed: int
    steps: int
    outlier_at: int | None = None

    def __str__(self) -> str:
        outlier = "" if self.outlier_at is None else f"-outlier{self.outlier_at}"
        return f"{self.model}-{self.steps}-{self.configuration}-seed{self.seed}{outlier}"

    def path(self, results: Path) -> Path:
        """The file of the finished run."""
        return results / f"{self}.json"


@dataclass
class Record:
    """One run, finished or under way."""

    key: Key
    command: str
    versions: str
    nodes_x_ranks: str
    numel: int = 0
    steps_done: int = 0
    train_losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean over the ranks and the steps since the last)."""
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    inter_nbytes: list[int] = field(default_factory=list)
    """Sent between nodes by all ranks until each held-out loss: by steps, not by evaluations."""
    inter_nbytes_per_step: int = 0
    """Of the median step that did not follow an evaluation."""
    is_counted: bool = True
    """Whether bytes were counted, not calculated."""
    gradient_errors: list[tuple[int, float]] = field(default_factory=list)
    weight_errors: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """What the library said in warnings, once each."""
    seconds: float = 0.0
    error: str = ""
    """Why there is nothing more."""

    def write(self, results: Path) -> None:
        """Into the results folder, whole or not at all."""
        path = self.key.path(results)
        results.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.as_dict().items()]
        draft.write_text("{" + ",\n ".join(lines) + "}\n", encoding="utf-8")
        draft.replace(path)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """From what :meth:`as_dict` gave, with or without a way through JSON."""
        return cls(**values | {"key": Key(**values["key"])})

    @classmethod
    def read(cls, key: Key, results: Path) -> Record | None:
        """The run's record, if there is a file."""
        path = key.path(results)
        return cls.of(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    @classmethod
    def all_in(cls, results: Path) -> list[Record]:
        """Every record of the folder."""
        return [cls.of(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob("*-seed*.json"))]

    @property
    def is_finished(self) -> bool:
        """Whether all steps were taken: what failed is tried again."""
        return not self.error and self.steps_done == self.key.steps

    def add_log(self, line: str) -> None:
        """Keep a line of the library's log."""
        line = f"step {self.steps_done}: {line}"
        if line not in self.log:
            self.log.append(line)


class LibraryLog(logging.Handler):
    """Keeps what the library warns of in a run's record."""

    def __init__(self, record: Record) -> None:
        super().__init__(logging.WARNING)
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self._record.add_log(record.getMessage())

    def __enter__(self) -> LibraryLog:
        for name in ("zero", "zcomm"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("zero", "zcomm"):
            logging.getLogger(name).removeHandler(self)
