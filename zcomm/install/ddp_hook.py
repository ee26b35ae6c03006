"""The communication hook that DDP calls with each bucket of gradients.

DDP checks the hook's signature: a plain function with a parameter named ``bucket`` whose annotation is a type. A string
annotation is refused, so this module must not import ``annotations`` from ``__future__``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]


def exchange_gradients(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Start to average ``bucket`` over all ranks; the future is complete when the bucket holds the mean."""
    future: torch.futures.Future[Tensor] = state.start(bucket)
    return future


def new_future(device: torch.device) -> torch.futures.Future[Any]:
    """Make a future that DDP may wait for on another stream.

    Without ``devices`` it would not record the CUDA stream on which it is completed, and DDP would read the bucket
    before the exchange has written it.
    """
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def value_or_raise(ended: torch.futures.Future[Any]) -> Tensor:
    """Return the result of a completed exchange, or raise its error.

    ``Future.set_exception`` is for Python's ``wait()`` only: DDP's reducer, in C++, would take the exception for a
    gradient. A callback of ``then()`` that raises completes its future with an error that C++ sees, too.
    """
    result = ended.value()
    if isinstance(result, BaseException):
        raise result
    assert isinstance(result, Tensor), f"an exchange ended with {result!r}"
    return result
