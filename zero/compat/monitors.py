"""``deepspeed.monitor``: its classes over :class:`zero._runtime.monitors.Monitor`; the first rank writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from zero._config import read_source
from zero._config.sections import Config
from zero._runtime.monitors import Monitor

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


class MonitorMaster(Monitor):
    """All monitors of a configuration: what ``engine.monitor`` is."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config._values, is_first_rank=_is_first_rank())


class _SectionMonitor(Monitor):
    """The monitor of one section, whose values are its attributes."""

    name: ClassVar[str]

    def __init__(self, section: Any) -> None:
        self._section = section
        super().__init__(replace(Config(), **{self.name: section}), is_first_rank=_is_first_rank())

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
