"""The reduced gradient of one shard in host memory, summed over micro-batches.

mean on the device --rounded to the parameters' dtype--> host     the first mean is kept in that dtype
                                                           |
                                                           +----> later means are added to a float32 sum
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero._storage.gradient_store import GradientStore
from zero._storage.host_memory import HostMemory, PendingCopy
from zero._storage.poison import poison


class HostGradient(GradientStore):
    """The gradient of one shard.

    Args:
        numel: Elements of the shard.
        sent: The dtype in which means are copied to the host.
        wide: The dtype of sums.
        host: Allocates the memory, and copies.

    Cost: for each mean, ``sent.itemsize`` bytes per element to the host. Memory for one mean; from the second mean of a
    step on, also for the sum.
    """

    is_on_device, is_in_file = False, False

    def __init__(self, numel: int, sent: torch.dtype, wide: torch.dtype, host: HostMemory) -> None:
        self._numel, self._sent, self._wide, self._host = numel, sent, wide, host
        self._mean: Tensor | None = None
        """The last mean, of dtype ``sent``."""
        self._sum: Tensor | None = None
        self._copy: PendingCopy | None = None
        self._num_means = 0
        self._is_wide = False
        """Whether the gradient is in ``_sum``; if not, it is in ``_mean``."""

    def add(self, mean: Tensor) -> None:
        """Add ``mean``, [numel] on the device. It may be overwritten at once."""
        self._finish_copy()  # the next copy overwrites the memory of this mean
        if self._num_means and not self._is_wide:
            self._widen()
        if self._mean is None:
            self._mean = self._host.empty(self._numel, self._sent)
        self._copy = self._host.fetch_gradient(mean, self._mean)
        self._num_means += 1

    def values(self, *, wide: bool = False) -> Tensor:
        """The gradient as it is stored; ``wide``: in the dtype of sums, so that it can be edited."""
        self._finish_copy()
        if wide and not self._is_wide:
            self._widen()
        values = self._sum if self._is_wide else self._mean
        assert values is not None, "values of a gradient without a mean"
        return values

    def change(self, edit: Callable[[Tensor], object]) -> None:
        """Call ``edit`` on the gradient, in the dtype of sums."""
        edit(self.values(wide=True))

    def clear(self) -> None:
        """Drop the gradient; its memory is kept for the next one."""
        self._finish_copy()
        self._num_means, self._is_wide = 0, False
        for tensor in self.tensors:
            poison(tensor)

    def new_like(self) -> HostGradient:
        """An empty gradient of the same kind; its memory is allocated at the first mean."""
        return HostGradient(self._numel, self._sent, self._wide, self._host)

    def _finish_copy(self) -> None:
        """Wait for the copy in flight, and add its mean to the sum."""
        if self._copy is None:
            return
        self._copy.wait()
        self._copy = None
        if self._is_wide:
            assert self._sum is not None, "a sum without memory"
            assert self._mean is not None, "a mean without memory"
            self._sum.add_(self._mean)

    def _widen(self) -> None:
        """Continue in the dtype of sums."""
        assert self._mean is not None, "a sum of a gradient without a mean"
        self._is_wide = True
        if self._sent == self._wide:
            self._mean, self._sum = self._sum, self._mean
            return
        if self._sum is None:
            self._sum = self._host.empty(self._numel, self._wide)
        self._sum.copy_(self._mean)

    @property
    def tensors(self) -> list[Tensor]:
        """The allocated memory."""
        return [tensor for tensor in (self._mean, self._sum) if tensor is not None]
