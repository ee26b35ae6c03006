"""Old spellings that are more than another name: each is rewritten before parsing, with a note that is a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zcomm import ConfigError
from zero._config.value_types import shown


def _offload(section: str) -> Callable[[dict[str, Any], Any], str]:
    def move(zero: dict[str, Any], value: Any) -> str:
        _check_bool(value)
        _put(zero, section, {"device": "cpu" if value else "none"})
        return f"zero_optimization.{section}.device"

    return move


def _pin(zero: dict[str, Any], value: Any) -> str:
    _check_bool(value)
    _put(zero, "offload_optimizer", {"pin_memory": value})
    return "zero_optimization.offload_optimizer.pin_memory"


def _put(zero: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    """Below what the section says itself; a section that is none is left to be refused."""
    below = zero.get(section)
    if below is None or isinstance(below, Mapping):
        zero[section] = {**values, **(below or {})}


def _check_bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false: got {shown(value)}")


MOVED: dict[str, Callable[[dict[str, Any], Any], str]] = {
    "cpu_offload": _offload("offload_optimizer"),
    "cpu_offload_param": _offload("offload_param"),
    "cpu_offload_params": _offload("offload_param"),
    "cpu_offload_use_pin_memory": _pin,
}
"""Keys of ``zero_optimization`` that live in a section of it now."""


def modernize(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Rewrite old spellings of ``raw``, which is not changed.

    Returns:
        The rewritten dict; a warning for each; the old path by the new one.
    """
    notes: list[str] = []
    origins: dict[str, str] = {}
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        notes.append(f"zero_optimization: {str(zero).lower()} is deprecated: write {{'stage': {int(zero)}}}")
        return {**raw, "zero_optimization": {"stage": int(zero)}}, notes, {}
    if not isinstance(zero, Mapping):
        return raw, notes, origins
    zero = dict(zero)
    for name, move in MOVED.items():
        if name in zero:
            old, value = f"zero_optimization.{name}", zero.pop(name)
            if value is None or (isinstance(value, str) and value == "auto"):
                continue
            try:
                new = move(zero, value)
            except ConfigError as error:
                raise ConfigError(f"{old} {error}") from None
            origins[new] = old
            notes.append(f"{old} is deprecated: write {new}")
    return {**raw, "zero_optimization": zero}, notes, origins


LEVELS = ("O0", "O1", "O2", "O3")
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's layers that normalise and may have weights; the first: batch and instance norms of every kind."""


def precision_preset(level: str, model: nn.Module | None = None) -> dict[str, Any]:
    """The keys of a configuration that mean what Apex's ``opt_level`` means.

    O0: float32. O1: float32 parameters, the engine's forward under float16 autocast, dynamic loss scale. O2: float16
    but for the normalisation layers of ``model``, float32 masters, dynamic loss scale. O3: float16 throughout, loss
    scale 1; the masters are float32 here, too, one shard of them a rank. At O2 and O3 the engine casts floating-point
    inputs to float16, as Apex does; outputs stay float16 (Apex: float32).

    Normalisation layers are torch's (batch, instance, layer, group and RMS norms), and every module whose class has
    "norm" in its name and whose own parameters have at most one dimension longer than 1: ``LlamaRMSNorm``, but neither
    ``NormalizedLinear`` nor a block that only contains a norm. They compute in float32 and return what they were given.

    Args:
        level: One of the four.
        model: For O2, which normalisation layers to leave in float32; None: there are none.

    Raises:
        ConfigError: Another level.
    """
    if level not in LEVELS:
        raise ConfigError(f"the level must be one of {', '.join(LEVELS)}: got {level!r}")
    if level == "O0":
        return {}
    if level == "O1":
        return {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    if level == "O3":
        return {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1.0}}
    named = [] if model is None else model.named_modules()
    norms = [f".{name}" for name, module in named if name and _normalizes(module)]
    kept = {"data_types": {"keep_in_fp32_modules": norms}} if norms else {}
    return {"fp16": {"enabled": True, "auto_cast": True}, **kept}


def _normalizes(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False)]
    if isinstance(module, NORMS):
        return bool(own or [*module.buffers(recurse=False)])
    is_named_so = "norm" in type(module).__name__.lower()
    return is_named_so and bool(own) and all(sum(n > 1 for n in param.shape) <= 1 for param in own)
