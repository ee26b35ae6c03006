"""What stands for a tensor whose values are in a file: NaN, without memory of its own. Reading it never crashes.

A dtype that has no NaN gets ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_rest", "is_at_rest"]


def at_rest(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of NaN, all elements of which are the same memory."""
    return torch.full((), float("nan") if dtype.is_floating_point else 1, dtype=dtype).expand(numel)


def is_at_rest(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for values in a file."""
    return tensor.stride() == (0,)
