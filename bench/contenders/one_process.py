"""The same training in one process, with the batches of all ranks: how far contenders are from it."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from contenders.job import batch, new_setup
from contenders.muon import Both, optimizers

__all__ = ["OneProcess"]


class OneProcess:
    """The weights after some steps of one process, float32.

    Args:
        arguments: The job's.
        dtype: Of the computation.
        world_size: The number of ranks whose batches it has.
        accumulation: Micro-batches of a rank in a step.
        has_muon: Whether Muon updates the matrices of blocks.
    """

    def __init__(
        self, arguments: argparse.Namespace, dtype: str, world_size: int, *, accumulation: int, has_muon: bool
    ) -> None:
        self._arguments, self._dtype, self._world_size = arguments, dtype, world_size
        self._accumulation, self._has_muon = accumulation, has_muon
        self._known: dict[tuple[int, bool], list[Tensor]] = {}

    def distances(self, num_steps: int, weights: Iterable[Tensor]) -> tuple[float, float]:
        """How far ``weights`` are from those after ``num_steps`` steps, over how far these are from the start.

        Also the same of one process that has the sequences in the opposite order: what rounding alone does.
        """
        start = self._weights(0)
        ends = self._weights(num_steps), self._weights(num_steps, is_reversed=True)
        moved = _norm(ends[0], start)
        return _norm(weights, ends[0]) / moved, _norm(ends[1], ends[0]) / moved

    def _weights(self, num_steps: int, *, is_reversed: bool = False) -> list[Tensor]:
        if (num_steps, is_reversed) not in self._known:
            self._known[num_steps, is_reversed] = self._trained(num_steps, is_reversed=is_reversed)
        return self._known[num_steps, is_reversed]

    def _trained(self, num_steps: int, *, is_reversed: bool) -> list[Tensor]:
        setup = new_setup(self._arguments, self._dtype, torch.device("cpu"))
        masters, model = setup.model, copy.deepcopy(setup.model).to(setup.dtype)
        optimizer: Any = AdamW(masters.parameters(), lr=setup.learning_rate, fused=True)
        if self._has_muon:
            optimizer = Both(optimizers(masters, setup.learning_rate, fused=True))
        for step in range(num_steps):
            for tokens, targets in self._micro_batches(step, is_reversed=is_reversed):
                (model(tokens, targets) / self._accumulation).backward()
                _add_gradients(masters.parameters(), model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for rounded, master in zip(model.parameters(), masters.parameters(), strict=True):
                    rounded.copy_(master)
        return [param.detach() for param in masters.parameters()]

    def _micro_batches(self, step: int, *, is_reversed: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of all ranks, side by side."""
        device, count = torch.device("cpu"), self._accumulation
        of_ranks = [batch(self._arguments, step, r, device, num_batches=count) for r in range(self._world_size)]
        for micro in range(count):
            parts = [[tensor.chunk(count)[micro] for tensor in tensors] for tensors in of_ranks]
            tokens, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            yield (tokens.flip(0), targets.flip(0)) if is_reversed else (tokens, targets)


def _add_gradients(masters: Iterable[Tensor], params: Iterable[Tensor]) -> None:
    """Add the gradients of ``params`` to those of ``masters`` in float32."""
    for master, param in zip(masters, params, strict=True):
        assert param.grad is not None, "a parameter without a gradient"
        wide = param.grad.float()
        master.grad = wide if master.grad is None else master.grad + wide
        param.grad = None


def _norm(weights: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The norm of the difference of all."""
    pairs = zip(weights, others, strict=True)
    squares = [(a.detach().cpu().double() - b.double()).square().sum() for a, b in pairs]
    return float(torch.stack(squares).sum().sqrt())
