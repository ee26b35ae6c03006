"""Decides which keys take effect, which are inactive and why, and which this version refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from zero._config.keys import Definition, definitions, section_type
from zero._config.parse import Configuration
from zero._config.sections import Config
from zero._config.value_types import shown
from zero._config.zero_section import ZeroOptimization
from zero.errors import NotAvailableError


class Condition(NamedTuple):
    """The condition under which keys take effect."""

    holds: Callable[[Config], bool]
    otherwise: str
    """The reason if it does not hold."""


def is_float16(config: Config) -> bool:
    """Whether gradients need a loss scale: float16 parameters, or the engine's forward under float16 autocast."""
    autocast = config.torch_autocast
    return config.fp16.enabled or (autocast.enabled and autocast.dtype in ("fp16", "float16", "half"))


def uses_nvme(config: Config) -> bool:
    zero = config.zero_optimization
    return "nvme" in (zero.offload_param.device, zero.offload_optimizer.device, config.zcomm.activations)


def _zero(holds: Callable[[ZeroOptimization], bool], otherwise: str) -> Condition:
    """A condition on ``zero_optimization`` alone."""
    return Condition(lambda config: holds(config.zero_optimization), otherwise)


CONDITIONS = {
    "stage 1+": _zero(lambda z: z.stage >= 1, "stage is 0"),
    "stage 3": _zero(lambda z: z.stage == 3, "stage is below 3"),
    "stage 3, overlapped": _zero(
        lambda z: z.stage == 3 and z.overlap_comm, "stage is below 3, or overlap_comm is false"
    ),
    "hpZ": _zero(
        lambda z: z.stage == 3 and z.zero_hpz_partition_size > 1, "zero_hpz_partition_size is 1, or stage is below 3"
    ),
    "fp16": Condition(lambda c: c.fp16.enabled, "fp16 is not enabled"),
    "float16": Condition(is_float16, "neither fp16 nor float16 autocast is enabled"),
    "bf16": Condition(lambda c: c.bf16.enabled, "bf16 is not enabled"),
    "16 bit": Condition(lambda c: c.fp16.enabled or c.bf16.enabled, "neither fp16 nor bf16 is enabled"),
    "dynamic loss scale": Condition(
        lambda c: is_float16(c) and c.fp16.loss_scale == 0, "the loss scale is not dynamic"
    ),
    "torch_autocast": Condition(lambda c: c.torch_autocast.enabled, "torch_autocast is not enabled"),
    "plain gradients": Condition(
        lambda c: c.zcomm.gradient_format is None and not c.zero_optimization.zero_quantized_gradients,
        "gradients have a wire format of their own",
    ),
    "offload_param": _zero(lambda z: z.offload_param.device != "none", "offload_param.device is none"),
    "offload_param nvme": _zero(lambda z: z.offload_param.device == "nvme", "offload_param.device is not nvme"),
    "offload_optimizer": _zero(lambda z: z.offload_optimizer.device != "none", "offload_optimizer.device is none"),
    "offload_optimizer nvme": _zero(
        lambda z: z.offload_optimizer.device == "nvme", "offload_optimizer.device is not nvme"
    ),
    "a mode": Condition(lambda c: c.zcomm.mode is not None, "zcomm.mode is not set"),
    "delta_hpz": Condition(lambda c: c.zcomm.mode == "delta_hpz", "zcomm.mode is not delta_hpz"),
    "delayed update": Condition(
        lambda c: c.zcomm.delayed_update and c.zero_optimization.offload_optimizer.device != "none",
        "zcomm.delayed_update is false, or offload_optimizer.device is none",
    ),
    "comms_logger": Condition(lambda c: c.comms_logger.enabled, "comms_logger is not enabled"),
    "flops_profiler": Condition(lambda c: c.flops_profiler.enabled, "flops_profiler is not enabled"),
    "tensorboard": Condition(lambda c: c.tensorboard.enabled, "tensorboard is not enabled"),
    "csv_monitor": Condition(lambda c: c.csv_monitor.enabled, "csv_monitor is not enabled"),
    "wandb": Condition(lambda c: c.wandb.enabled, "wandb is not enabled"),
    "comet": Condition(lambda c: c.comet.enabled, "comet is not enabled"),
    "one buffer": Condition(
        lambda c: c.activation_checkpointing.contiguous_memory_optimization, "contiguous_memory_optimization is false"
    ),
    "activations nvme": Condition(lambda c: c.zcomm.activations == "nvme", "zcomm.activations is not nvme"),
    "nvme": Condition(uses_nvme, "nothing is offloaded to nvme"),
}


OFF = {"enabled": (False, None), "deepcompile": (False, None), "autotp_size": (0, 1, None)}
"""The switches of sections that nothing reads, and the values with which such a section requests nothing."""


class Setting(NamedTuple):
    """One key, its value, and whether it takes effect."""

    definition: Definition
    value: Any
    origin: str
    """Where the value was given, or "default"."""
    inactive: str
    """Why it has no effect; empty if it has one."""
    unavailable: str
    """What it requests and this version does not have; empty if nothing."""

    @property
    def is_given(self) -> bool:
        return self.origin != "default"


@cache
def _readers() -> tuple[tuple[Definition, Callable[[Config], Any]], ...]:
    """Every key but sections, with what reads its value."""
    keys = (definition for definition in definitions(Config) if section_type(definition.kind) is None)
    return tuple((definition, attrgetter(definition.path)) for definition in keys)


def settings_of(configuration: Configuration) -> Iterator[Setting]:
    """Every key but sections, in the order of definition."""
    for definition, read in _readers():
        value = read(configuration.values)
        facts = definition.key
        condition = CONDITIONS.get(facts.active_if)
        inactive = "" if condition is None or condition.holds(configuration.values) else condition.otherwise
        is_requested = _requests_something(definition, value) and not inactive
        yield Setting(
            definition,
            value,
            configuration.origins.get(definition.path, "default"),
            inactive or facts.inactive,
            facts.unavailable if is_requested else "",
        )


def _requests_something(definition: Definition, value: Any) -> bool:
    if not definition.key.unavailable or value == definition.default:
        return False
    if isinstance(value, dict):  # a section of which only the names are known
        return not any(name in value and value[name] in off for name, off in OFF.items())
    return True


def check_available(configuration: Configuration) -> None:
    """Refuse keys that are known but not implemented.

    Raises:
        NotAvailableError: Names every such key and its value.
    """
    wrong = [s for s in settings_of(configuration) if s.unavailable]
    if wrong:
        raise NotAvailableError(
            "not available in this version: "
            + "; ".join(f"{s.definition.path}={shown(s.value)} ({s.unavailable})" for s in wrong)
            + ". Remove these keys, or set them to their defaults"
        )


def unused_notes(configuration: Configuration) -> list[str]:
    """One line for every key that was given and has no effect."""
    return [
        f"{s.definition.path}={shown(s.value)} has no effect: {s.inactive}"
        for s in settings_of(configuration)
        if s.is_given and s.inactive
    ]
