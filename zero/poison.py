"""With ``ZERO_DEBUG=1`` memory that is given back is filled with NaN: whoever still reads it finds out.

That holds for every buffer that is used again: of gathered parameters and of gradients on their way (:mod:`zero.pool`),
of gradients in host memory, between memory and files, and of saved inputs. On a GPU the fill is work of the current
stream, as the next use would be: an exchange or a copy on another stream that is still reading would send NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm import env

__all__ = ["poison"]


def poison(buffer: Tensor) -> None:
    """Fill it, in debug mode alone. Bytes become those of NaN in every floating type."""
    if env.is_set("ZERO_DEBUG"):
        buffer.fill_(255 if buffer.dtype == torch.uint8 else float("nan"))
