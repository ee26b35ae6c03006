"""What the benchmark knows of a way to train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:  # a process that measures a peer's memory has nothing of this library
    from zcomm import Topology

__all__ = ["Contender", "Setup", "torch_step"]


@dataclass(frozen=True)
class Setup:
    """What every contender gets."""

    model: nn.Module
    """Its own, with float32 parameters, on the device; ``model(tokens, targets)`` is the loss."""
    dtype: torch.dtype
    """Of the computation; optimizer states and what they are added to are float32."""
    learning_rate: float
    num_sequences: int
    """In a rank's batch."""
    topology: Topology | None = None
    """Which ranks share a node; None: as torchrun has it."""
    folder: str | None = None
    """For files of what is offloaded to NVMe."""


@dataclass
class Contender:
    """A model in training."""

    step: Callable[[Tensor, Tensor], Tensor]
    """One optimizer step on tokens and targets [accumulation x sequences, tokens]; returns this rank's loss."""
    accumulation: int = 1
    """Batches in a step."""
    close: Callable[[], object] = lambda: None
    num_steps: int = 0
    loss: float = float("nan")


def torch_step(
    model: nn.Module,
    optimizer: Optimizer,
    within: AbstractContextManager[object] | None = None,
    *,
    accumulation: int = 1,
    accumulates: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A step as torch's own loops have it.

    Each forward runs in the context ``within``. All batches but the last run, forward and backward, in a context that
    ``accumulates`` makes, which puts the exchange of gradients off.
    """
    context = within or nullcontext()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        batches = list(zip(tokens.chunk(accumulation), targets.chunk(accumulation), strict=True))
        for number, batch in enumerate(batches):
            with accumulates() if number < accumulation - 1 else nullcontext():
                with context:
                    loss: Tensor = model(*batch)
                if accumulation > 1:
                    loss = loss / accumulation
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
