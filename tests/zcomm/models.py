"""Models whose gradients a test can compute or compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Given(nn.Module):
    """Parameters of given sizes whose gradients are the inputs: loss = sum of (parameter x input)."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, numel in sizes.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))
            self.add_module(name, module)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss; parameters that get no input are unused."""
        return torch.stack([(self.get_submodule(name).weight * x).sum().float() for name, x in inputs.items()]).sum()


def mlp(width: int = 64, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)
    )  # fmt: skip
    torch.set_rng_state(generator_state)
    return model.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The batch of ``rank`` in ``step``."""
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def flat_grad(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def mean_grad(model: nn.Module, step: int, world_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mean of all ranks' gradients of ``model``, computed in this process."""
    grads = []
    for rank in range(world_size):
        model.zero_grad()
        model(batch(rank, step, dtype)).float().square().mean().backward()
        grads.append(flat_grad(model).double())
    model.zero_grad()
    return torch.stack(grads).mean(0)
