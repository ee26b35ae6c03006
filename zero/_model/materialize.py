"""Materialize a module on ``meta``: memory and values for its own parameters and buffers, which keep their identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from zcomm import LayoutError


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of ``module`` itself."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def give_values(
    name: str, module: nn.Module, materialize: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Allocate the parameters and buffers of ``module`` that are on meta, and initialize them.

    Args:
        name: The module's name, for errors.
        module: Changed in place; its parameters stay the same objects, so tied ones stay tied.
        materialize: A function of a module. Default: the module's ``reset_parameters``.
        device: The device of the values.

    Raises:
        LayoutError: There is no such function, or it leaves a tensor without values.
    """
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    given = {key: tensor for key, tensor in named if tensor.is_meta}
    reset = getattr(module, "reset_parameters", None)
    if materialize is None and reset is None:
        raise LayoutError(
            f"module {name!r} ({type(module).__name__}) is on meta and has no reset_parameters(): pass "
            "zero.Init(module=..., materialize=a function of a module), for example materialize=model._init_weights"
        )
    versions = {}
    for key, tensor in given.items():
        empty = torch.empty_like(tensor, device=device)
        if empty.is_floating_point():
            empty.fill_(float("nan"))  # a tensor that stays NaN was not initialized: see below
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(empty, tensor.requires_grad)
            new.__dict__.update(tensor.__dict__)
            # Changes the tensor in place: modules and optimizers that refer to it keep their parameter.
            torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
        else:
            module._buffers[key] = empty
        versions[key] = empty._version
    if materialize is not None:
        materialize(module)
    elif reset is not None:
        reset()
    for key in given:
        value = getattr(module, key)
        if value.is_floating_point() and value.isnan().any():
            is_missing = True
        else:
            is_missing = not value.is_floating_point() and value._version == versions[key]
        if is_missing:
            raise LayoutError(
                f"{f'{name}.{key}'.lstrip('.')!r} was on meta and was given no value: materialize= must do that for "
                f"each {type(module).__name__}, or build that part outside of torch.device('meta')"
            )
