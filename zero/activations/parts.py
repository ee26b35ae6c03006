"""Saved inputs divided over tensor-parallel ranks, which all have the same: each keeps its part.

values [n]  = | part 0 | part 1 | ... | part N-1, padded |      N parts of ceil(n / N)
backward: one all-gather of the parts, of the same bytes that were saved
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm import LayoutError, Topology, all_gather_single, control

__all__ = ["Parts"]

NUM_SAMPLES = 64
TOLERANCE = 0.05
"""Of the largest value: what ranks may differ by that compute the same."""


class Parts:
    """The tensor-parallel ranks of this one, in groups of their own."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._is_checked = False

    def numel(self, numel: int) -> int:
        """Elements of each part of ``numel`` values."""
        return -(-numel // self._topology.world_size)

    def take(self, values: Tensor) -> Tensor:
        """This rank's part of ``values`` [n]: [ceil(n / N)]. Until the first backward, collective.

        Raises:
            LayoutError: On every rank, if they have different values: those must not be divided.
        """
        if not self._is_checked:
            self._check_equal(values)
        numel = self.numel(values.numel())
        start = min(self._topology.rank * numel, values.numel())
        part = values[start : start + numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def gather(self, part: Tensor, numel: int) -> Tensor:
        """All values [numel], from every rank's part. Collective."""
        self._is_checked = True
        whole = part.new_empty(part.numel() * self._topology.world_size)
        all_gather_single(whole, part, self._topology)
        return whole[:numel]

    def close(self) -> None:
        """Free the process groups."""
        self._topology.close()

    def _check_equal(self, values: Tensor) -> None:
        """A sample of them: ranks with other sequences or batches are found at the first look."""
        samples = torch.zeros(1 + NUM_SAMPLES, dtype=torch.float64)
        taken = values[:: max(values.numel() // NUM_SAMPLES, 1)][:NUM_SAMPLES].to("cpu", torch.float64)
        samples[0], samples[1 : 1 + taken.numel()] = values.numel(), taken
        of_ranks = control.gather_float64(samples, self._topology)
        spread = (of_ranks - of_ranks[0]).abs().amax(0)
        limit = TOLERANCE * of_ranks[0, 1:].abs().max()
        if spread[0] > 0 or (spread[1:] > limit).any():  # NaN compares as equal
            raise LayoutError(
                "inputs of checkpointed functions must be the same on all tensor-parallel ranks to be divided over "
                f"them: elements by rank {of_ranks[:, 0].int().tolist()}, first values {of_ranks[:, 1].tolist()}. Turn "
                "partition_activations off where ranks have parts of a sequence or batch"
            )
