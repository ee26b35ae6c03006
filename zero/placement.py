"""Moving and casting a model in place: parameters keep their identity, and with it their optimizer's groups.

Of parameters that zero.Init has divided, the shards are moved and cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zcomm import ConfigError, LayoutError
from zero.init_shards import construction_of

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
    with _without_divided(model):
        model.to(dtype)
    _convert_divided(model, dtype=dtype)
    for name, module in model.named_modules():
        if name in kept or any(part in kept for part in name.split(".")):
            with _without_divided(module):
                module.float()
            _convert_divided(module, dtype=torch.float32)
    _check_same(before, model)


def move(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device`` in place."""
    before = list(model.parameters())
    with _without_divided(model):
        model.to(device)
    _convert_divided(model, device=device)
    _check_same(before, model)


def _convert_divided(model: nn.Module, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    for param in model.parameters():
        construction = construction_of(param)
        if construction is not None and (device not in (None, param.device) or dtype not in (None, param.dtype)):
            construction.convert(param, device=device, dtype=dtype)


@contextmanager
def _without_divided(model: nn.Module) -> Iterator[None]:
    """torch's own methods see no parameter that has no values here."""
    put_back: list[Callable[[], None]] = []
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and construction_of(param) is not None:
                put_back.append(lambda own=module._parameters, name=name, param=param: own.update({name: param}))  # type: ignore[misc]
                module._parameters[name] = None
    try:
        yield
    finally:
        for put in put_back:
            put()


def _check_same(before: list[nn.Parameter], model: nn.Module) -> None:
    if any(a is not b for a, b in zip(before, model.parameters(), strict=True)):
        raise LayoutError(
            "the model's parameters were replaced when it was moved or cast, so the optimizer has others: move and "
            "cast the model before constructing the optimizer"
        )
