"""Tensors as flat values and back, with the same strides: another layout may round differently.

[2, 3] with strides (1, 2)      all its memory             values [6] in the order of memory, without a copy
[2, 3] with strides (8, 1)      with gaps                  values [6]; the gaps come back with other contents
[2, 3] with strides (0, 1)      expanded                   values [3]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Form", "flatten", "is_movable"]

LEAST_NUMEL = 256
"""Smaller tensors stay where they are: moving them costs more than it saves."""


class Form(NamedTuple):
    """What a tensor is besides its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def distinct(self) -> tuple[int, ...]:
        """Its size without what is expanded."""
        return tuple(1 if stride == 0 else n for n, stride in zip(self.size, self.stride, strict=True))

    @property
    def order(self) -> list[int]:
        """Its dimensions, outermost first as in memory."""
        return sorted(range(len(self.size)), key=lambda dim: -self.stride[dim])

    @property
    def extent(self) -> int:
        """Elements from its first to its last in memory."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.distinct, self.stride, strict=True))

    def restore(self, values: Tensor) -> Tensor:
        """A tensor of this form with ``values`` [numel], a view of them if they fill its memory."""
        if values.numel() == self.extent:
            return values.as_strided(self.size, self.stride, values.storage_offset())
        memory, order = values.new_empty(self.extent), self.order
        target = memory.as_strided(self.distinct, self.stride).permute(order)
        target.copy_(values.view(target.shape))
        return memory.as_strided(self.size, self.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, Form]:
    """The values of ``tensor`` [numel], each element of memory once, and its form."""
    form = Form(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
    distinct = tensor.detach().as_strided(form.distinct, form.stride)
    return distinct.permute(form.order).reshape(-1), form


def is_movable(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an activation that may rest elsewhere: plain, floating point, not small, not trained."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if tensor.is_leaf and tensor.requires_grad:  # somebody keeps it for its gradient
        return False
    return tensor.is_floating_point() and tensor.numel() >= LEAST_NUMEL and not _overlaps(tensor)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory in another way than by being expanded."""
    end = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride > 0:
            if stride <= end:
                return True
            end += (n - 1) * stride
    return False
