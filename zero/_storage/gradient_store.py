"""Where the reduced gradient of a bucket is kept between backward and step: chosen once for each bucket.

DeviceGradient                          the memory of the device
zero._storage.host_gradient             host memory, for states that are updated there
zero._optim.gradient_files              a file, for states in files
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class GradientStore(Protocol):
    """The reduced sum of one shard's gradient, over the micro-batches of a step."""

    is_on_device: bool
    is_in_file: bool

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The memory that it holds."""

    def target(self, *, is_first: bool) -> Tensor | None:  # noqa: ARG002
        """Memory of its own for the next mean, where :meth:`add` need not copy it; ``is_first``: of this step.

        None: means are copied from the device.
        """
        return None

    @abstractmethod
    def add(self, mean: Tensor) -> None:
        """Add ``mean`` [n], on the device. It may be overwritten at once."""

    @abstractmethod
    def values(self, *, wide: bool = False) -> Tensor:
        """The sum; ``wide``: in the dtype of sums, so that it can be edited."""

    @abstractmethod
    def change(self, edit: Callable[[Tensor], object]) -> None:
        """Call ``edit`` on all that it has, in the dtype of sums."""

    def set_aside(self) -> bool:
        """Keep the sum apart if its memory is needed for local gradients; returns whether it was."""
        return False

    @abstractmethod
    def clear(self) -> None:
        """Drop the sum."""

    def new_like(self) -> GradientStore | None:
        """An empty one, for a delayed update that still reads this one; None: such updates do not read it."""
        return None


class DeviceGradient(GradientStore):
    """In the memory of the device.

    Args:
        result: [n], of the dtype of sums. At stages 0 and 1 this rank's rows of the buffer of local gradients.
    """

    is_on_device, is_in_file = True, False

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self._earlier: Tensor | None = None
        """Stages 0 and 1: a copy of the sum so far, whose memory the next local gradients overwrite."""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.result] if self._earlier is None else [self.result, self._earlier]

    def target(self, *, is_first: bool) -> Tensor | None:
        return self.result if is_first else None

    def add(self, mean: Tensor) -> None:
        if mean is not self.result:
            self.result.add_(mean)
        if self._earlier is not None:
            self.result.add_(self._earlier)
            self._earlier = None

    def values(self, *, wide: bool = False) -> Tensor:  # noqa: ARG002  (it has the dtype of sums)
        return self.result

    def change(self, edit: Callable[[Tensor], object]) -> None:
        for tensor in self.tensors:
            edit(tensor)

    def set_aside(self) -> bool:
        self._earlier = self.result.clone()
        return True

    def clear(self) -> None:
        self._earlier = None


def rounded(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """``mean`` with its values rounded to ``dtype``, in place: what a copy to host memory would have."""
    return mean if mean.dtype == dtype else mean.copy_(mean.to(dtype))
