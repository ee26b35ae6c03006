"""The function that DDP calls with each bucket of gradients. Its shape is DDP's: a plain function whose parameter is
called ``bucket``, with annotations that are types, not strings, so this module does not postpone them.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

__all__ = ["Exchange", "GradBucket", "exchange_gradients"]


class Exchange(Protocol):
    """What the hook needs of its state."""

    def start(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket."""


def exchange_gradients(state: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Begin to average ``bucket`` over all ranks; the future is complete when the bucket holds the mean."""
    return state.start(bucket)
