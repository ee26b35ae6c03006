"""The interface of a contender: what it is built from, and one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:  # a process that measures a peer's memory must not import this library
    from zcomm import Topology

__all__ = ["Contender", "ContenderSetup", "torch_step"]


@dataclass(frozen=True)
class ContenderSetup:
    """The job that every contender is built for."""

    model: nn.Module
    """A copy for this contender, float32, on the device; ``model(tokens, targets)`` returns the loss."""
    dtype: torch.dtype
    """Dtype of the computation; optimizer states and masters are float32."""
    matmul_dtype: torch.dtype
    """Dtype of the model's matrix products: float32 on a CPU that is slow at those of ``dtype``."""
    learning_rate: float
    num_sequences: int
    """Sequences in a rank's batch."""
    topology: Topology | None = None
    """The ranks by node; None: as torchrun has started them."""
    folder: str | None = None
    """Folder for files of the NVMe tier."""

    def autocast(self) -> torch.autocast:
        """Autocast for a model with float32 parameters; disabled if :attr:`matmul_dtype` is float32."""
        device, dtype = next(self.model.parameters()).device.type, self.matmul_dtype
        return torch.autocast(device, dtype, enabled=dtype != torch.float32)


@dataclass
class Contender:
    """A model in training."""

    step: Callable[[Tensor, Tensor], Tensor]
    """One optimizer step on tokens and targets [accumulation x sequences, tokens]; returns this rank's loss."""
    accumulation: int = 1
    """Micro-batches in a step."""
    close: Callable[[], object] = lambda: None
    weights: Callable[[], Iterable[Tensor]] | None = None
    """The full float32 weights in the order of the model's parameters, the same on every rank. Collective."""
    settle: Callable[[], object] = lambda: None
    """Wait for what the last step has begun to send: a next step would hide some of it, and the clock must not."""
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
    """Return a step of a plain torch training loop.

    Each forward runs in the context ``within``. Forward and backward of all batches but the last run in a context that
    ``accumulates`` creates, which defers the exchange of gradients.
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
