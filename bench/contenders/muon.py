"""Muon for the matrices of the blocks, AdamW for the rest: as one optimizer, and over FSDP2's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

__all__ = ["Both", "GatheredMuon", "divided_muon", "optimizers"]

LEARNING_RATE, WEIGHT_DECAY = 0.02, 0.1
"""Of Muon; AdamW has the job's learning rate, and the same weight decay."""


def optimizers(
    model: nn.Module, learning_rate: float, muon: Callable[..., Optimizer] = Muon, **options: Any
) -> list[Optimizer]:
    """``muon`` over the matrices in the blocks of ``model``, and AdamW over everything else."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    for param in matrices:
        param.stacked_parts = 1  # type: ignore[attr-defined]  # fused projections are one matrix, as elsewhere
    chosen = set(matrices)
    others = [p for _, p in named if p not in chosen]
    return [
        muon(matrices, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        AdamW(others, lr=learning_rate, weight_decay=WEIGHT_DECAY, **options),
    ]


class Both:
    """Several optimizers with the two methods that a training loop calls."""

    def __init__(self, several: Sequence[Optimizer]) -> None:
        """Step and clear all of ``several``."""
        self._several = several

    def step(self) -> None:
        """Step every optimizer."""
        for one in self._several:
            one.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for one in self._several:
            one.zero_grad()


class GatheredMuon(Muon):
    """torch's Muon over sharded parameters: momentum is sharded, and every rank gathers every matrix, in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Gather each update of momentum, orthogonalize it on every rank, and apply this rank's rows."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param.grad))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = torch.lerp(param.grad, buffer, group["momentum"]).bfloat16()
                whole = orthogonal(update.full_tensor(), group)
                rows, columns = param.shape
                param.mul_(1 - group["lr"] * group["weight_decay"])
                first = _first_row(param)
                local = param.to_local()
                part = whole[first : first + local.shape[0]].to(local.dtype)
                local.add_(part, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def divided_muon(matrices: Sequence[Tensor], lr: float, weight_decay: float) -> Optimizer:
    """The Muon of the package muon-fsdp2, with torch's rule: each matrix is gathered and updated on one rank."""
    group = {"params": matrices, "lr": lr, "weight_decay": weight_decay, "use_muon": True, "rms_scale": False}
    optimizer: Optimizer = import_module("muon_fsdp2").Muon([group])
    return optimizer


def _first_row(param: DTensor) -> int:
    """The first row of the full matrix that this rank has."""
    mesh, size = param.device_mesh, param.shape[0]
    dimension = mesh.ndim - 1  # the one that parameters are sharded over; HSDP replicates over the first
    chunk = -(-size // mesh.size(dimension))
    return min(mesh.get_local_rank(dimension) * chunk, size)


def orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """The iteration of torch's Muon."""
    a, b, c = group["ns_coefficients"]
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
