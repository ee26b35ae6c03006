"""The reduced gradient of one shard, summed over micro-batches in host memory.

mean on the device --rounded to the parameters' dtype--> host     the first: rests as it came
                                                           |
                                                           +----> the others: added to a float32 sum
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero._storage.host_memory import Arrival, HostMemory
from zero._storage.poison import poison


class HostGradient:
    """One sum.

    Args:
        numel: Elements of the shard.
        sent: The dtype that means come in.
        wide: The dtype of sums.
        host: Where it rests.

    Cost: ``sent.itemsize`` bytes an element for each mean to the host; memory for one mean, and with the second mean of
    a step for the sum and another mean.
    """

    def __init__(self, numel: int, sent: torch.dtype, wide: torch.dtype, host: HostMemory) -> None:
        self._numel, self._sent, self._wide, self._host = numel, sent, wide, host
        self._mean: Tensor | None = None
        """The last mean, in ``sent``."""
        self._sum: Tensor | None = None
        self._arrival: Arrival | None = None
        self._num_means = 0
        self._is_wide = False
        """Whether the sum, not the mean, is what the gradient is."""

    def add(self, mean: Tensor) -> None:
        """Add a mean, on the device, [numel]. It may be overwritten at once."""
        self._settle()
        if self._num_means and not self._is_wide:
            self._widen()
        if self._mean is None:
            self._mean = self._host.empty(self._numel, self._sent)
        self._arrival = self._host.fetch_gradient(mean, self._mean)
        self._num_means += 1

    def values(self, *, wide: bool = False) -> Tensor:
        """The gradient as it rests; ``wide``: in the dtype of sums, to be changed at will."""
        self._settle()
        if wide and not self._is_wide:
            self._widen()
        values = self._sum if self._is_wide else self._mean
        assert values is not None, "a gradient that never came"
        return values

    def change(self, edit: Callable[[Tensor], object]) -> None:
        """Let ``edit`` write to it, in the dtype of sums."""
        edit(self.values(wide=True))

    def clear(self) -> None:
        """Forget the gradient; its memory is kept for the next."""
        self._settle()
        self._num_means, self._is_wide = 0, False
        for tensor in self.tensors:
            poison(tensor)

    def another(self) -> HostGradient:
        """A sum of the same kind, with memory of its own once it is needed."""
        return HostGradient(self._numel, self._sent, self._wide, self._host)

    def _settle(self) -> None:
        """Wait for the last mean, and add it."""
        if self._arrival is None:
            return
        self._arrival.wait()
        self._arrival = None
        if self._is_wide:
            assert self._sum is not None, "a sum without memory"
            assert self._mean is not None, "a mean without memory"
            self._sum.add_(self._mean)

    def _widen(self) -> None:
        """Go on in the dtype of sums."""
        assert self._mean is not None, "a gradient that never came"
        self._is_wide = True
        if self._sent == self._wide:
            self._mean, self._sum = self._sum, self._mean
            return
        if self._sum is None:
            self._sum = self._host.empty(self._numel, self._wide)
        self._sum.copy_(self._mean)

    @property
    def tensors(self) -> list[Tensor]:
        """The memory it holds."""
        return [tensor for tensor in (self._mean, self._sum) if tensor is not None]
