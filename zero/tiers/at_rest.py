"""What stands for a tensor whose values are in a file: NaN, without memory of its own. Reading it never crashes.

Of encoded moments it is the bytes 255, which decode to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_rest", "is_at_rest"]


def at_rest(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of NaN, or of 255, all elements of which are the same memory."""
    return torch.full((), 255 if dtype == torch.uint8 else float("nan"), dtype=dtype).expand(numel)


def is_at_rest(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for values in a file."""
    return tensor.stride() == (0,)
