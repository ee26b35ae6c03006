"""Modules on ``meta``: memory and values for their own parameters and buffers, which keep their identity."""

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
    """Give what ``module``, called ``name``, has on meta memory on ``device``, and values.

    Args:
        name: For errors.
        module: Changed in place; its parameters are the same objects, tied ones too.
        materialize: A function of a module; default: the module's ``reset_parameters``.
        device: Where the values will be.

    Raises:
        LayoutError: There is no such function, or it leaves something without a value.
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
            empty.fill_(float("nan"))  # what gets no value is found below
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(empty, tensor.requires_grad)
            new.__dict__.update(tensor.__dict__)
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
