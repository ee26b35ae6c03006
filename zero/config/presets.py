"""Apex's optimization levels as configurations."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zcomm import ConfigError

__all__ = ["precision_preset"]

LEVELS = ("O0", "O1", "O2", "O3")


def precision_preset(level: str, model: nn.Module | None = None) -> dict[str, Any]:
    """The keys of a configuration that mean what Apex's ``opt_level`` means.

    O0: float32. O1: float32 parameters, the engine's forward under float16 autocast, dynamic loss scale. O2: float16
    but for the batch norms of ``model``, float32 masters, dynamic loss scale. O3: float16 throughout, loss scale 1; the
    masters are float32 here, too, one shard of them a rank.

    Args:
        level: One of the four.
        model: For O2, which batch norms to leave in float32; None: there are none.

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
        return {"fp16": {"enabled": True, "loss_scale": 1.0}}
    named = [] if model is None else model.named_modules()
    norms = [name for name, module in named if isinstance(module, _BatchNorm) and name]
    kept = {"data_types": {"keep_in_fp32_modules": norms}} if norms else {}
    return {"fp16": {"enabled": True}, **kept}
