"""Moving and casting a model in place: parameters keep their identity, and with it their optimizer's groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zcomm import ConfigError, LayoutError

__all__ = ["cast", "move"]


def cast(model: nn.Module, dtype: torch.dtype | None, kept: Sequence[str] = ()) -> None:
    """Cast the floating-point parameters and buffers of ``model``; None leaves them as they are.

    Args:
        model: Changed in place.
        dtype: Of all of them, but for those of modules that are named in ``kept``.
        kept: Parts of dotted names; such modules become float32.

    Raises:
        ConfigError: ``kept`` names no module.
    """
    if dtype is None:
        return
    names = {part for name, _ in model.named_modules() for part in (name, *name.split("."))}
    for name in kept:
        if name not in names:
            raise ConfigError(f"keep_in_fp32_modules must name modules: there is no {name!r} in {type(model).__name__}")
    before = list(model.parameters())
    model.to(dtype)
    for name, module in model.named_modules():
        if name in kept or any(part in kept for part in name.split(".")):
            module.float()
    _check_same(before, model)


def move(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device`` in place."""
    before = list(model.parameters())
    model.to(device)
    _check_same(before, model)


def _check_same(before: list[nn.Parameter], model: nn.Module) -> None:
    if any(a is not b for a, b in zip(before, model.parameters(), strict=True)):
        raise LayoutError(
            "the model's parameters were replaced when it was moved or cast, so the optimizer has others: move and "
            "cast the model before constructing the optimizer"
        )
