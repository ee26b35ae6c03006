"""Move or cast a model in place: parameters keep their identity, and so stay in their optimizer's groups.

For parameters that zero.Init has partitioned, the shards are moved or cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from zcomm import ConfigError, LayoutError
from zero._model.init_shards import construction_of

NARROW = (torch.float16, torch.bfloat16)


def cast(
    model: nn.Module, dtype: torch.dtype | None, kept: Sequence[str] = (), buffer_dtype: torch.dtype | None = None
) -> None:
    """Cast the floating-point parameters and buffers of ``model``.

    Args:
        model: Changed in place.
        dtype: The new dtype, except for modules named in ``kept``; None leaves parameters as they are.
        kept: Parts of dotted names, or "." and a full name. Such modules become float32 and compute in float32: 16-bit
            inputs are widened for them, and their outputs are cast back to the dtype of the inputs.
        buffer_dtype: The same for buffers. The statistics of batch and instance norms follow their parameters if it is
            None: torch computes with one dtype.

    Raises:
        ConfigError: A name in ``kept`` matches no module.
    """
    buffers = _floating_buffers(model, has_statistics=buffer_dtype is not None)
    _put(buffers, buffer_dtype)
    if dtype is None:
        return
    names = {part for name, _ in model.named_modules() for part in (name, f".{name}", *name.split("."))}
    for name in kept:
        if name not in names:
            raise ConfigError(f"keep_in_fp32_modules must name modules: there is no {name!r} in {type(model).__name__}")
    before = list(model.parameters())
    _convert(model, dtype=dtype)
    _put(buffers, buffer_dtype)
    for name, module in model.named_modules():
        if any(part in kept for part in (name, f".{name}", *name.split("."))):
            _convert(module, dtype=torch.float32)
            _widen_inputs(module)
    _check_same(before, model)


Buffers = dict[tuple[nn.Module, str], Tensor]


def _floating_buffers(model: nn.Module, *, has_statistics: bool) -> Buffers:
    """The floating-point buffers of ``model`` by their module and name, the statistics of norms among them if asked."""
    return {
        (module, name): buffer
        for module in model.modules()
        if has_statistics or not isinstance(module, _NormBase)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }


def _put(buffers: Buffers, dtype: torch.dtype | None) -> None:
    """Set ``buffers``, cast to ``dtype``."""
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer.to(dtype)


def move(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device`` in place."""
    before = list(model.parameters())
    _convert(model, device=device)
    _check_same(before, model)


class InFloat32:
    """Hooks of one module that cast 16-bit inputs to float32, and outputs back, while its parameters are float32.

    torch's own kernels take a float16 input with float32 weights for some norms and devices, and raise for others.
    """

    def __init__(self) -> None:
        self._given: list[torch.dtype | None] = []
        """For each running call the dtype of its 16-bit inputs."""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast 16-bit inputs to float32."""
        is_wide = not any(param.dtype in NARROW for param in module.parameters())
        leaves = tree_leaves((args, kwargs)) if is_wide else []
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in NARROW]
        self._given.append(tensors[0].dtype if tensors else None)
        if not tensors:
            return args, kwargs
        return tree_map_only(Tensor, lambda t: t.float() if t.dtype in NARROW else t, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """Cast outputs back. Called after an exception, too, or the list of calls would keep its entry."""
        dtype = self._given.pop() if self._given else None
        if dtype is None:
            return output
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, output)


def _widen_inputs(module: nn.Module) -> None:
    """Install InFloat32 on ``module``, for good: its parameters stay float32 when the optimizer is closed, too."""
    if not any(isinstance(getattr(hook, "__self__", None), InFloat32) for hook in module._forward_hooks.values()):
        hooks = InFloat32()
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, always_call=True)


def _convert(model: nn.Module, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    with _without_partitioned(model):
        for target in (device, dtype):  # one at a time and by position: a model may have a to() of its own
            if target is not None:
                model.to(target)
    for param in model.parameters():
        construction = construction_of(param)
        if construction is not None and (device not in (None, param.device) or dtype not in (None, param.dtype)):
            construction.convert(param, device=device, dtype=dtype)


@contextmanager
def _without_partitioned(model: nn.Module) -> Iterator[None]:
    """Hide partitioned parameters, which have no values on this rank, from torch's own methods."""
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
            "the model's parameters were replaced when it was moved or cast, so the optimizer holds the old ones: move "
            "and cast the model before constructing the optimizer"
        )
