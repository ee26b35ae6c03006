"""Moving and casting a model in place: parameters keep their identity, and with it their optimizer's groups.

Of parameters that zero.Init has divided, the shards are moved and cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zcomm import ConfigError, LayoutError
from zero._model.init_shards import construction_of

NARROW = (torch.float16, torch.bfloat16)


def cast(model: nn.Module, dtype: torch.dtype | None, kept: Sequence[str] = ()) -> None:
    """Cast the floating-point parameters and buffers of ``model``; None leaves them as they are.

    Args:
        model: Changed in place.
        dtype: Of all of them, but for those of modules that are named in ``kept``.
        kept: Parts of dotted names, or "." and a whole name; such modules become float32 and compute in it: inputs of
            16 bits are widened for them, and what they return is as narrow as what they were given.

    Raises:
        ConfigError: ``kept`` names no module.
    """
    if dtype is None:
        return
    names = {part for name, _ in model.named_modules() for part in (name, f".{name}", *name.split("."))}
    for name in kept:
        if name not in names:
            raise ConfigError(f"keep_in_fp32_modules must name modules: there is no {name!r} in {type(model).__name__}")
    before = list(model.parameters())
    with _without_divided(model):
        model.to(dtype)
    _convert_divided(model, dtype=dtype)
    for name, module in model.named_modules():
        if any(part in kept for part in (name, f".{name}", *name.split("."))):
            with _without_divided(module):
                module.float()
            _convert_divided(module, dtype=torch.float32)
            _widen_inputs(module)
    _check_same(before, model)


def move(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device`` in place."""
    before = list(model.parameters())
    with _without_divided(model):
        model.to(device)
    _convert_divided(model, device=device)
    _check_same(before, model)


class InFloat32:
    """Hooks of one module: inputs of 16 bits become float32, and outputs get their dtype, unless it is cast again.

    torch's own kernels take a float16 input with float32 weights for some norms and devices, and raise for others.
    """

    def __init__(self) -> None:
        self._given: list[torch.dtype | None] = []
        """Of the calls that run, the dtype of their 16-bit inputs."""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Widen."""
        is_wide = not any(param.dtype in NARROW for param in module.parameters())
        leaves = tree_leaves((args, kwargs)) if is_wide else []
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in NARROW]
        self._given.append(tensors[0].dtype if tensors else None)
        if not tensors:
            return args, kwargs
        return tree_map_only(Tensor, lambda t: t.float() if t.dtype in NARROW else t, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """Narrow again; after an exception, too, when there is no output."""
        dtype = self._given.pop() if self._given else None
        if dtype is None:
            return output
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, output)


def _widen_inputs(module: nn.Module) -> None:
    """They stay on the module: its parameters, too, stay float32 among narrow ones when its optimizer is closed."""
    if not any(isinstance(getattr(hook, "__self__", None), InFloat32) for hook in module._forward_hooks.values()):
        hooks = InFloat32()
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, always_call=True)


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
