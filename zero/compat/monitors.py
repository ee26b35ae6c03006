"""``deepspeed.monitor``: its classes over :class:`zero._runtime.monitors.Monitor`; the first rank writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from zero._config import read_source
from zero._config.sections import Config
from zero._runtime.monitors import WRITERS, EventWriter, Monitor

SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


class DeepSpeedMonitorConfig:
    """The sections of monitors; sections of other names are left out."""

    def __init__(self, **given: Any) -> None:
        self._values = read_source({name: given[name] for name in SECTIONS if name in given}).values

    def __getattr__(self, name: str) -> Any:
        if name in SECTIONS:
            return getattr(self._values, name)
        raise AttributeError(name)

    @property
    def enabled(self) -> bool:
        """Whether any monitor is."""
        return any(getattr(self, name).enabled for name in SECTIONS)


class _SectionMonitor(Monitor):
    """The monitor of one section, whose values are its attributes."""

    name: ClassVar[str]

    def __init__(self, section: Any) -> None:
        self._section = section
        super().__init__(replace(Config(), **{self.name: section}), is_first_rank=_is_first_rank())

    @classmethod
    def over(cls, section: Any, writers: list[EventWriter]) -> _SectionMonitor:
        """The monitor of ``section`` with ``writers``, which are open."""
        made = cls.__new__(cls)
        made._section, made._writers, made.enabled = section, writers, True
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._section, name)


class TensorBoardMonitor(_SectionMonitor):
    """``tensorboard``."""

    name = "tensorboard"


class WandbMonitor(_SectionMonitor):
    """``wandb``."""

    name = "wandb"


class csvMonitor(_SectionMonitor):  # noqa: N801  (DeepSpeed's name)
    """``csv_monitor``."""

    name = "csv_monitor"


class CometMonitor(_SectionMonitor):
    """``comet``."""

    name = "comet"


ATTRIBUTES: dict[str, type[_SectionMonitor]] = {
    "tb_monitor": TensorBoardMonitor, "wandb_monitor": WandbMonitor, "csv_monitor": csvMonitor,
    "comet_monitor": CometMonitor,
}  # fmt: skip


class MonitorMaster(Monitor):
    """All monitors of a configuration: what ``engine.monitor`` is.

    ``tb_monitor``, ``wandb_monitor``, ``csv_monitor`` and ``comet_monitor`` are those that this rank writes, else None.
    """

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config._values, is_first_rank=_is_first_rank())

    @classmethod
    def over(cls, monitor: Monitor) -> MonitorMaster:
        """``monitor``, which stays in use: what one closes is closed in both."""
        made = cls.__new__(cls)
        vars(made).update(vars(monitor))
        return made

    def __getattr__(self, name: str) -> _SectionMonitor | None:
        if name not in ATTRIBUTES:
            raise AttributeError(name)
        kind = ATTRIBUTES[name]
        section = getattr(self._config, kind.name)
        writers = [writer for writer in self._writers if isinstance(writer, WRITERS[type(section)])]
        return kind.over(section, writers) if writers else None


class EngineMonitor:
    """The attribute ``monitor`` of an engine, as a :class:`MonitorMaster`."""

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        return self if engine is None else vars(engine)["monitor"]

    def __set__(self, engine: Any, monitor: Monitor) -> None:
        vars(engine)["monitor"] = MonitorMaster.over(monitor)
