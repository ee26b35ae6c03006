"""``zero config explain``: every setting with its value, its origin, and the reason if it is inactive."""

from __future__ import annotations

from zero._config.batch import solve_batch_sizes
from zero._config.key_support import Setting, settings_of
from zero._config.parse import Configuration
from zero._config.value_types import shown


def explain(configuration: Configuration, *, world_size: int | None = None, shows_all: bool = False) -> str:
    """The text that ``zero config explain`` prints.

    Args:
        configuration: As read and checked.
        world_size: The number of ranks to solve the batch sizes for; None: leave them as given.
        shows_all: Include keys that are not given and have no effect.

    Raises:
        ConfigError: The batch sizes contradict each other for ``world_size``.
    """
    settings = list(settings_of(configuration))
    listed = [s for s in settings if shows_all or s.is_given or not (s.inactive or _is_unset(s))]
    width = max(len(s.definition.path) for s in listed)
    lines = [f"{configuration.source}: {sum(s.is_given for s in settings)} keys given, {len(settings)} known", ""]
    lines += [_line(s, width) for s in listed]
    hidden = len(settings) - len(listed)
    if hidden:
        lines += ["", f"{hidden} keys at their defaults have no effect here; --all shows them"]
    lines += ["", _batch_line(configuration, world_size)]
    lines += [f"warning: {note}" for note in configuration.notes]
    refused = [s for s in settings if s.unavailable]
    lines += [f"not available in this version: {s.definition.path}={shown(s.value)} ({s.unavailable})" for s in refused]
    return "\n".join(lines) + "\n"


def _is_unset(setting: Setting) -> bool:
    """Whether the key is not given and its default requests nothing."""
    return not setting.is_given and (bool(setting.definition.key.unavailable) or setting.value in (None, {}, ()))


def _line(setting: Setting, width: int) -> str:
    text = f"{setting.definition.path:<{width}} = {_shown(setting.value):<12} [{setting.origin}]"
    if setting.unavailable:
        return f"{text}  NOT AVAILABLE in this version: {setting.unavailable}"
    return f"{text}  inactive: {setting.inactive}" if setting.inactive else text


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _batch_line(configuration: Configuration, world_size: int | None) -> str:
    config = configuration.values
    if world_size is None:
        given = (config.train_batch_size, config.train_micro_batch_size_per_gpu)
        if given == (None, None):
            return f"batch: {solve_batch_sizes(config, 1).note}"
        return "batch: train_batch_size = micro-batch x accumulation x ranks; --world-size N solves it"
    sizes = solve_batch_sizes(config, world_size)
    if sizes.train is None:
        return f"batch: {sizes.note}"
    return (
        f"batch on {world_size} ranks: {sizes.train} samples per step = {sizes.micro} per rank and backward "
        f"x {sizes.accumulation} backwards x {world_size} ranks"
    )
