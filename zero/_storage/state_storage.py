"""Where the master and the moments of a bucket are stored, and where they are updated: chosen once for each bucket.

StateStorage    the memory of the device
HostStates      host memory
FileStates      files, a sub-group at a time                     in zero._optim.state_files

The reduced gradient is stored beside them, so the same object makes its GradientStore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zero._storage.gradient_store import DeviceGradient, GradientStore
from zero._storage.host_gradient import HostGradient
from zero._storage.host_memory import HostMemory


class StateStorage:
    """On ``device``, where the parameters are used."""

    is_on_host = is_in_files = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def moments(self) -> Mapping[str, torch.dtype]:
        """The optimizer's moments that are in files, by name."""
        return {}

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory where states are updated, flat; its contents are undefined."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def new_master(self, initial: Tensor, dtype: torch.dtype) -> Tensor:
        """A master with the values ``initial`` [n]."""
        return self.empty(initial.numel(), dtype).copy_(initial)

    def masters(self, master: Tensor, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, Tensor]]:
        """The values of ``master`` in parts, ``(start, stop, values)``; ``ranges`` are preferred."""
        for start, stop in ranges:
            yield start, stop, master[start:stop]

    def in_memory(self, *, writes: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Inside, master and moments are in memory; ``writes``: what is changed there is stored. Not collective."""
        return nullcontext()

    def reader(self, moment: str, base: int) -> Callable[[int, int], Tensor] | None:  # noqa: ARG002
        """Reads elements ``[base + start, base + stop)`` of a moment, or of the master, ``""``; None: in memory."""
        return None

    def new_gradient(self, numel: int, sent: torch.dtype, wide: torch.dtype, rows: Tensor | None) -> GradientStore:  # noqa: ARG002
        """The store of the reduced gradient.

        Args:
            numel: Elements of the shard.
            sent: The dtype in which means leave the device.
            wide: The dtype of sums.
            rows: Memory on the device for them, if there is some already.
        """
        return DeviceGradient(torch.zeros(numel, dtype=wide, device=self._device) if rows is None else rows)


class HostStates(StateStorage):
    """In host memory, and updated there."""

    is_on_host = True

    def __init__(self, host: HostMemory, device: torch.device) -> None:
        super().__init__(device)
        self.host = host

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.host.empty(numel, dtype)

    def new_gradient(self, numel: int, sent: torch.dtype, wide: torch.dtype, rows: Tensor | None) -> GradientStore:  # noqa: ARG002
        return HostGradient(numel, sent, wide, self.host)
