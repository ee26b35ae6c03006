"""The function that DDP calls with each bucket of gradients. Its shape is DDP's: a plain function whose parameter is
called ``bucket``, with annotations that are types, not strings, so this module does not postpone them.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]


class HookState(Protocol):
    """What the hook needs of its state."""

    def start(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket."""


def exchange_gradients(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Begin to average ``bucket`` over all ranks; the future is complete when the bucket holds the mean."""
    return state.start(bucket)


def new_future(device: torch.device) -> torch.futures.Future[Any]:
    """One that, on CUDA, remembers the stream on which it was completed."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def value_or_raise(ended: torch.futures.Future[Any]) -> Tensor:
    """What an exchange ended with; raises it, if that is an error."""
    result = ended.value()
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Tensor), f"an exchange ended with {result!r}"
    return result
