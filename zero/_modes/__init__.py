"""Modes: what ``zcomm.mode`` changes about the stages. One file each; mode.py says what a mode decides.

In:  settings, and the buckets and buffers of _sharding.
Out: the settings in effect, where parameters come from, where gradients go, and what that costs.
Called by: _model for the settings, _runtime for the parts, plan for the estimate.
"""

from zcomm import ConfigError, Topology
from zero._config.settings import Effective, ZeroSettings
from zero._modes.delta import Delta
from zero._modes.delta_hpz import DeltaHpz
from zero._modes.mode import Mode

MODES: dict[str | None, Mode] = {mode.name: mode for mode in (Mode(), DeltaHpz(), Delta())}


def resolve_mode(settings: ZeroSettings, topology: Topology) -> Effective:
    """Decide which of ``settings``, the mode included, take effect. The same on every rank.

    Raises:
        ConfigError: The mode is not combined with another setting; see also :func:`zero._config.settings.resolve`.
    """
    mode = MODES[settings.mode]
    if settings.stage not in mode.stages:
        raise ConfigError(f"mode={mode.name!r} needs {mode.needs}: stage={settings.stage}; {mode.instead}")
    return mode.resolve(settings, topology)
