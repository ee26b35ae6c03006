"""An exponential moving average of the trained weights, sharded like the masters: EMA at every stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zcomm import ConfigError, control
from zero._optim.masters import pieces_by_bucket
from zero._ranks.collective_calls import calling_over
from zero._runtime.optimizer_parts import OptimizerParts
from zero._sharding.bucket import Bucket


class MovingAverage:
    """What torch's ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` has as parameters, without a full copy.

    Args:
        optimizer: A ZeroOptimizer.
        decay: In [0, 1): ``average = decay * average + (1 - decay) * master``.

    Raises:
        ConfigError: ``decay`` is not in this range.

    Memory: each rank's part of the float32 masters, where those are, or in host memory if they are in files.
    """

    def __init__(self, optimizer: object, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay must be in [0, 1): decay={decay}")
        self._parts: OptimizerParts = optimizer.parts  # type: ignore[attr-defined]
        self.decay = decay
        self._averages: dict[Tensor, Tensor] = {}

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for bucket in self._parts.runtime.buckets if bucket.is_trainable]

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights; the first call copies them. Call it after ``step()``, on every rank."""
        for bucket, pieces in pieces_by_bucket(self._buckets, self._parts.pieces).items():
            with self._parts.runtime.in_memory([bucket]):
                for piece in pieces:
                    if piece.master in self._averages:
                        self._averages[piece.master].lerp_(piece.master, 1 - self.decay)
                    else:
                        self._averages[piece.master] = piece.master.detach().clone()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages, to evaluate, save or load them; afterwards its own weights. Collective.

        A step inside is a StateError. A checkpoint that is saved inside holds the averages as weights, and
        ``load_checkpoint(..., load_module_only=True)`` inside loads them, on any number of ranks. A delayed update is
        finished before. Cost: that of writing back all parameters, twice.
        """
        runtime = self._parts.runtime
        runtime.finish_update(writes_back=True)
        replicas = {bucket: held.clone() for bucket, held in runtime.mode_state.replica_shards().items()}
        has_begun = bool(self._averages)
        self._swap()
        runtime.has_averages = True
        try:
            yield
        finally:
            runtime.has_averages = False
            differ = self._swap(compares=not has_begun)
            if not has_begun and not differ:  # nothing was loaded: the first update() is still to copy the weights
                self._averages.clear()
            runtime.mode_state.set_replicas(
                replicas
            )  # they differ from the masters: evaluation must not change training

    @torch.no_grad()
    def _swap(self, *, compares: bool = False) -> bool:
        """Exchange masters and averages; with ``compares`` returns whether they differ on any rank."""
        runtime, differ = self._parts.runtime, False
        with calling_over(runtime.topology, "MovingAverage.applied()"):
            for bucket, pieces in pieces_by_bucket(self._buckets, self._parts.pieces).items():
                with runtime.in_memory([bucket], is_changed=True):
                    for piece in pieces:
                        own = piece.master.detach().clone()
                        average = self._averages.get(piece.master, own)
                        differ = differ or (compares and not torch.equal(average, own))
                        piece.master.copy_(average)
                        self._averages[piece.master] = own
            runtime.write_back(self._buckets)
            return compares and bool(control.agree_max(torch.tensor([int(differ)]), runtime.topology).item())
