"""A gradient that comes after its bucket was reduced is reduced in a second exchange, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.zero.training import zero_optimizer
from zero.utils import safe_get_full_grad

WIDTH = 8


class _UsedTwice(nn.Module):
    """Each use of ``shared`` runs a backward of its own, between which its bucket, the first, is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, uses_twice: bool) -> Tensor:
        x = self.first(x).tanh()
        if uses_twice:
            x = checkpoint(self.shared, x, use_reentrant=True)
        return checkpoint(self.shared, self.between(x).tanh(), use_reentrant=True)


def _new() -> _UsedTwice:
    torch.manual_seed(0)
    return _UsedTwice().double()


def _check(rank: int, stage: int) -> None:
    world_size = torch.distributed.get_world_size()
    plain, model = _new(), _new()
    x = torch.linspace(-1, 1, world_size * 4 * WIDTH, dtype=torch.float64).view(world_size, 4, WIDTH)
    for each in range(world_size):  # the late gradient is the last rank's alone
        (plain(x[each], uses_twice=each == world_size - 1).sum() / world_size).backward()
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, reduce_bucket_size=1):
        model(x[rank], uses_twice=rank == world_size - 1).sum().backward()
        for (name, param), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            got = safe_get_full_grad(param)
            assert got is not None, name
            torch.testing.assert_close(got.double(), reference.grad, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_used_twice_under_reentrant_checkpointing(stage: int) -> None:
    run_ranks(1, _check, stage)
