"""Monitors: TensorBoard, CSV files, Weights & Biases and Comet, written by the first rank of the job.

Names, folders and the order of monitors are DeepSpeed's. Nothing here communicates.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from zcomm import BackendUnavailableError
from zero._config.monitor_sections import Comet, CsvMonitor, TensorBoard, Wandb
from zero._config.sections import Config

logger = logging.getLogger("zero")
Event = tuple[str, Any, int]
"""A name, its value, and where on the x axis: the samples so far."""


class Monitor:
    """Writes events to every monitor that a configuration enables; ``engine.monitor`` is one.

    Args:
        config: Its sections ``tensorboard``, ``wandb``, ``csv_monitor`` and ``comet``.
        is_first_rank: Whether this rank writes; the others ignore what they are given.

    Raises:
        BackendUnavailableError: The library of an enabled monitor cannot be imported.
        OSError: Its folder cannot be made.
    """

    def __init__(self, config: Config, *, is_first_rank: bool) -> None:
        self._config = config
        sections = config.tensorboard, config.wandb, config.csv_monitor, config.comet
        chosen = [section for section in sections if section.enabled]
        self.enabled = bool(chosen)
        """Whether any monitor is configured, as every rank sees it."""
        self._writers = [WRITERS[type(section)](section) for section in chosen] if is_first_rank else []

    @property
    def is_writing(self) -> bool:
        """Whether events that this rank gives are written."""
        return bool(self._writers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write ``(name, value, step)`` triples; a value may be a tensor of one element."""
        if not self._writers:
            return
        plain = [(name, value.item() if isinstance(value, Tensor) else value, step) for name, value, step in events]
        for writer in list(self._writers):
            try:
                writer.write(plain)
            except Exception:
                # A full disk must not end this rank alone: the others would wait for it in their next exchange.
                logger.warning("%s failed, and writes no more", type(writer).__name__, exc_info=True)
                self._writers.remove(writer)

    def close(self) -> None:
        """Close what was opened; later events are not written."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()


class EventWriter:
    """One monitor, opened."""

    def write(self, events: Sequence[Event]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close its files, if they stay open between events."""


class TensorBoardWriter(EventWriter):
    def __init__(self, section: TensorBoard) -> None:
        library = _library("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._writer = library.SummaryWriter(log_dir=str(Path(section.output_path) / section.job_name))

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class CsvWriter(EventWriter):
    def __init__(self, section: CsvMonitor) -> None:
        self._folder = Path(section.output_path) / section.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if not file.tell():  # a resumed job goes on in its files
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])


class WandbWriter(EventWriter):
    def __init__(self, section: Wandb) -> None:
        self._library = _library("wandb", "wandb", "wandb")
        self._library.init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._library.log({name: value}, step=step)


class CometWriter(EventWriter):
    def __init__(self, section: Comet) -> None:
        library = _library("comet_ml", "comet_ml>=3.41.0", "comet")
        names = "api_key", "project", "workspace", "experiment_key", "mode", "online"
        self._experiment = library.start(**{name: getattr(section, name) for name in names})
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval, self._last = section.samples_log_interval, dict[str, int]()

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            if name not in self._last or step - self._last[name] >= self._interval:
                self._last[name] = step
                self._experiment.log_metric(name, value, step=step)


WRITERS: dict[type, Any] = {
    TensorBoard: TensorBoardWriter, Wandb: WandbWriter, CsvMonitor: CsvWriter, Comet: CometWriter
}  # fmt: skip


def _library(module: str, package: str, section: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise BackendUnavailableError(
            f"{section}.enabled needs a library: {error}; pip install '{package}', or set it to false"
        ) from error
