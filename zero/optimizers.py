"""The optimizer that the JSON describes, as a torch optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from zcomm import ConfigError
from zero.config.read import nearest

__all__ = ["build_optimizer"]

KNOWN: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
"""torch's optimizers by their names in lower case."""


def build_optimizer(kind: str, params: dict[str, Any], parameters: Any) -> Optimizer:
    """An optimizer over ``parameters`` (parameters, or groups of them).

    ``"Adam"`` is AdamW unless ``adam_w_mode`` is false, and its ``weight_decay`` is 0 if absent, as in DeepSpeed.

    Raises:
        ConfigError: No such optimizer or option, with the nearest one.
    """
    chosen = {name: value for name, value in params.items() if value != "auto"}
    name = kind.lower()
    if name in ("adam", "adamw"):
        decouples = chosen.pop("adam_w_mode", True) or name == "adamw"
        chosen.pop("torch_adam", None)
        if not chosen.pop("bias_correction", True):
            raise ConfigError("optimizer.params.bias_correction must be true: torch's Adam always corrects its bias")
        name = "adamw" if decouples else "adam"
        chosen.setdefault("weight_decay", 0.0)
    if name not in KNOWN:
        raise ConfigError(f"optimizer.type must be an optimizer of torch.optim: got {kind!r}{nearest(name, KNOWN)}")
    cls = KNOWN[name]
    options = list(inspect.signature(cls).parameters)[1:]
    for option in chosen:
        if option not in options:
            raise ConfigError(f"optimizer.params of {kind} has no {option!r}{nearest(option, options)}")
    if "betas" in chosen:
        chosen["betas"] = tuple(chosen["betas"])
    optimizer: Optimizer = cls(parameters, **chosen)
    return optimizer
