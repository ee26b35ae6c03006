"""NaN in the place of values: in freed buffers under ``ZERO_DEBUG=1``, and in placeholders for values in a file.

With ``ZERO_DEBUG=1`` every reusable buffer is filled with NaN when it is given back, so that a late read shows in the
result: buffers of gathered parameters and unreduced gradients (_sharding/buffer_pool.py), of gradients in host memory,
between memory and files, and of saved inputs. On a GPU the fill is enqueued on the current stream, as the next use
would be: an exchange or a copy that still reads the buffer on another stream would send NaN.

A placeholder is a tensor of NaN without memory of its own; reading it never crashes. A dtype without NaN gets ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm._base import env


def poison(buffer: Tensor) -> None:
    """Fill ``buffer`` with NaN if ``ZERO_DEBUG`` is set. Bytes get a value that is NaN in every floating type."""
    if env.is_set("ZERO_DEBUG"):
        buffer.fill_(255 if buffer.dtype == torch.uint8 else float("nan"))


def placeholder(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of NaN whose elements all share one element of memory."""
    has_nan = dtype.is_floating_point or dtype.is_complex
    return torch.full((), float("nan") if has_nan else 1, dtype=dtype).expand(shape)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a placeholder for values in a file."""
    return tensor.ndim > 0 and not any(tensor.stride())
