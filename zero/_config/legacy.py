"""Rewrites deprecated keys before parsing, and Apex's opt levels as keys. Aliases are part of a key's definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zcomm import ConfigError
from zero._config.keys import ConfigKey
from zero._config.value_types import read_value

MOVED = {
    "cpu_offload": ("offload_optimizer", "device"),
    "cpu_offload_param": ("offload_param", "device"),
    "cpu_offload_params": ("offload_param", "device"),
    "cpu_offload_use_pin_memory": ("offload_optimizer", "pin_memory"),
}
"""Deprecated booleans of ``zero_optimization``: the section and the key that replace each."""


def modernize(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Rewrite deprecated keys in a copy of ``raw``.

    Returns:
        The rewritten dict; a warning for each deprecated key; old paths by new ones.
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
    for name, (section, key) in MOVED.items():
        if name in zero:
            old, value = f"zero_optimization.{name}", zero.pop(name)
            if value is None or (isinstance(value, str) and value == "auto"):
                continue
            value = read_value(bool, ConfigKey(doc="-"), value, old)
            own, new = zero.get(section), f"zero_optimization.{section}.{key}"
            if own is None or isinstance(own, Mapping):  # its own keys win; the parser refuses what is no object
                device = "cpu" if value else "none"
                zero[section] = {key: device if key == "device" else value, **(own or {})}
            origins[new] = old
            notes.append(f"{old} is deprecated: write {new}")
    return {**raw, "zero_optimization": zero}, notes, origins


LEVELS = ("O0", "O1", "O2", "O3")
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's normalization layers that may have weights; ``_NormBase`` is the base of all batch and instance norms."""


def precision_preset(level: str, model: nn.Module | None = None) -> dict[str, Any]:
    """Configuration keys that do what Apex's ``opt_level`` does.

    O0: float32. O1: float32 parameters, the engine's forward under float16 autocast, dynamic loss scale. O2: float16
    except for the normalization layers of ``model``, float32 masters, dynamic loss scale. O3: float16 throughout, loss
    scale 1; masters are float32 here, too, one shard a rank. At O2 and O3 the engine casts floating-point inputs to
    float16, as Apex does; outputs stay float16 (Apex: float32).

    Normalization layers are torch's (batch, instance, layer, group and RMS norms), and every module whose class has
    "norm" in its name and whose own parameters have at most one dimension longer than 1: ``LlamaRMSNorm``, but neither
    ``NormalizedLinear`` nor a block that only contains a norm. They compute in float32 and return the dtype of their
    input.

    Args:
        level: "O0", "O1", "O2" or "O3".
        model: For O2, the model whose normalization layers stay in float32; None: no layer does.

    Raises:
        ConfigError: Unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"level must be one of {', '.join(LEVELS)}: level={level!r}")
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
