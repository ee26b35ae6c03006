"""What the benchmark knows of a way to train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


@dataclass
class Contender:
    """A model in training."""

    step: Callable[[Tensor, Tensor], Tensor]
    """One optimizer step on tokens and targets [sequences, tokens]; returns this rank's loss."""
    close: Callable[[], object] = lambda: None
    num_steps: int = 0
    loss: float = float("nan")


def torch_step(
    model: nn.Module, optimizer: Optimizer, within: AbstractContextManager[object] | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """A step as torch's own loops have it; the forward runs ``within`` that, each time."""
    context = within or nullcontext()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with context:
            loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
