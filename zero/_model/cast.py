"""Move or cast a model in place: parameters keep their identity, and so stay in their optimizer's groups.

For parameters that zero.Init has partitioned, the shards are moved or cast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
        kept: Parts of dotted names, or "." and a full name. Such modules become float32, with the bits of their values,
            and compute in float32: 16-bit inputs are widened for them, and their outputs are cast back to the dtype of
            the inputs.
        buffer_dtype: The new dtype of buffers outside of these; None leaves them as they are, but for the statistics of
            batch and instance norms, which follow their parameters: torch computes with one dtype.

    Complex parameters and buffers stay: as real ones they would lose their imaginary part.

    Raises:
        ConfigError: A name in ``kept`` matches no module.
    """
    if dtype is None:
        _put(list(_new_buffers(model, (), buffer_dtype)))
        return
    chosen = _named(model, kept)
    wide = {part for module in chosen for part in module.modules()}
    wide_params = {param for module in wide for param in module._parameters.values() if param is not None}
    before, buffers = list(model.parameters()), list(_new_buffers(model, wide, buffer_dtype))
    exact = {
        param: param.data
        for param in before
        if construction_of(param) is None and (param in wide_params or param.is_complex())
    }
    for module, name, _ in buffers:
        module._buffers[name] = None  # so that they are not converted
    try:
        _convert(model, dtype=dtype, wide=wide_params)
    finally:
        _put(buffers)
    for param, values in exact.items():
        param.data = values if values.is_complex() else values.float()
    for module in chosen:
        _widen_inputs(module)
    _check_same(before, model)


def _put(buffers: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def _named(model: nn.Module, kept: Sequence[str]) -> list[nn.Module]:
    """The modules that ``kept`` names."""
    parts_of = {module: (name, f".{name}", *name.split(".")) for name, module in model.named_modules()}
    names = {part for parts in parts_of.values() for part in parts}
    for name in kept:
        if name not in names:
            raise ConfigError(f"keep_in_fp32_modules must name modules: there is no {name!r} in {type(model).__name__}")
    return [module for module, parts in parts_of.items() if any(part in kept for part in parts)]


def _new_buffers(
    model: nn.Module, wide: Collection[nn.Module], dtype: torch.dtype | None
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The buffers that do not follow the parameters: module, name and new value, which stays shared."""
    new: dict[tuple[int, bool], Tensor] = {}
    for module in model.modules():
        is_wide = module in wide
        for name, buffer in module._buffers.items():
            if buffer is None or not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            if isinstance(module, _NormBase) and dtype is None and not is_wide:
                continue
            own = (torch.float32 if buffer.dtype in NARROW else buffer.dtype) if is_wide else dtype or buffer.dtype
            key = id(buffer), is_wide
            if key not in new:
                new[key] = buffer if buffer.is_complex() else buffer.to(own)
            yield module, name, new[key]


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


def _convert(
    model: nn.Module,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    wide: Collection[nn.Parameter] = (),
) -> None:
    """``wide``: partitioned ones of these become float32."""
    with _without_partitioned(model):
        for target in (device, dtype):  # one at a time and by position: a model may have a to() of its own
            if target is not None:
                model.to(target)
    for param in model.parameters():
        construction, own = construction_of(param), torch.float32 if param in wide else dtype
        if construction is not None and (device not in (None, param.device) or own not in (None, param.dtype)):
            construction.convert(param, device=device, dtype=own)


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
