"""With ``ZERO_DEBUG=1`` memory that is given back is filled with NaN: whoever still reads it finds out.

That holds for every buffer that is used again: of gathered parameters and of gradients on their way (:mod:`zero._sharding.buffer_pool`),
of gradients in host memory, between memory and files, and of saved inputs. On a GPU the fill is work of the current
stream, as the next use would be: an exchange or a copy on another stream that is still reading would send NaN.

What stands for a tensor whose values are in a file: NaN, without memory of its own. Reading it never crashes.

A dtype that has no NaN gets ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._base import env


def poison(buffer: Tensor) -> None:
    """Fill it, in debug mode alone. Bytes become those of NaN in every floating type."""
    if env.is_set("ZERO_DEBUG"):
        buffer.fill_(255 if buffer.dtype == torch.uint8 else float("nan"))


def at_rest(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of NaN, all elements of which are the same memory."""
    return torch.full((), float("nan") if dtype.is_floating_point else 1, dtype=dtype).expand(numel)


def is_at_rest(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for values in a file."""
    return tensor.stride() == (0,)
