"""Checks that refuse models which flat buffers would train wrongly, such as parameters that share memory.

They run before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zcomm import ConfigError
from zero._sharding.released import is_released


class AddressRange(NamedTuple):
    """The address range of a tensor, from its first element to its last."""

    start: int
    stop: int
    label: str
    tensor: Tensor


def check_is_plain(model: nn.Module) -> None:
    """Raise ConfigError, with the name, for TorchScript, lazy modules, and parameters that share memory."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"its module {name!r}" if name else "model"
            raise ConfigError(
                f"{where} is compiled by TorchScript, which calls no hooks: give the module it was made from; "
                "torch.compile works"
            )
    tensors = [*_labelled("parameter", model.named_parameters()), *_labelled("buffer", model.named_buffers())]
    for label, tensor in tensors:
        if is_lazy(tensor):
            raise ConfigError(
                f"{label} of a lazy module has no shape yet: call the model once, on every rank, before it is given to "
                "ZeroOptimizer"
            )
    check_memory(tensors)


def check_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError if a trained parameter shares memory with another of ``tensors``, or with itself.

    Args:
        tensors: Each tensor once, with a label for errors. Tensors without values are ignored.
    """
    extents = sorted((_extent(label, t) for label, t in tensors if has_memory(t)), key=lambda e: e.start)
    before: list[AddressRange] = []
    for extent in extents:
        tensor = extent.tensor
        if tensor.requires_grad and any(
            n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise ConfigError(
                f"the elements of {extent.label} share memory, and would be trained apart: give it memory of its own "
                "(param.data = param.data.clone()), or use a smaller parameter and expand it in forward"
            )
        before = [other for other in before if other.stop > extent.start]
        for other in before:
            if (tensor.requires_grad or other.tensor.requires_grad) and _overlap(other, extent):
                raise ConfigError(
                    f"{other.label} and {extent.label} share memory, and would be trained apart: tie parameters by "
                    "making them one (b.weight = a.weight, not b.weight.data = a.weight.data), or give each memory of "
                    "its own (param.data = param.data.clone())"
                )
        before.append(extent)


def _labelled(kind: str, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(f"{kind} {name!r}", tensor) for name, tensor in tensors]


def has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` has elements at an address."""
    if is_lazy(tensor) or is_released(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _extent(label: str, tensor: Tensor) -> AddressRange:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return AddressRange(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), label, tensor)


def _overlap(a: AddressRange, b: AddressRange) -> bool:
    """Whether two tensors with overlapping extents share an element; two columns of a matrix do not."""
    size = a.tensor.element_size()
    if size != b.tensor.element_size() or (a.start - b.start) % size:
        return True
    if a.tensor.is_contiguous() and b.tensor.is_contiguous():
        return True
    return bool(torch.isin(_elements(a, a.start), _elements(b, a.start)).any())


def _elements(extent: AddressRange, origin: int) -> Tensor:
    """The positions of all elements, relative to ``origin``, [numel]."""
    size = extent.tensor.element_size()
    first, last = (extent.start - origin) // size, (extent.stop - origin) // size
    return torch.arange(first, last).as_strided(extent.tensor.shape, extent.tensor.stride()).flatten()
