"""Embeddings with ``sparse=True``: their gradients are made dense, so that training is that of ``sparse=False``."""

# covers zero/_gradients/bucket_gradients.py

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks, topology
from zcomm import ConfigError
from zero import GatheredParameters, ZeroOptimizer

ROWS, WIDTH = 11, 4


class Tagged(nn.Module):
    """A table that is looked up twice, one that is also a dense weight, and one of bags."""

    def __init__(self, *, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        self.tied = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse, dtype=dtype)
        self.head = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
        self.head.weight = self.tied.weight

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.words(indices) * self.words(indices.flip(0)) + self.tied(indices) + self.bags(indices[:, None])
        return self.head(hidden).float().square().mean()  # type: ignore[no-any-return]


def _weights(rank: int, stage: int, dtype: torch.dtype, *, sparse: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Tagged(sparse=sparse, dtype=dtype)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = ZeroOptimizer(model, sgd, stage=stage, topology=topology(2))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for _ in range(2):
            model(torch.randint(ROWS, (3,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with GatheredParameters(model.parameters()):
        weights = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return weights


def _check_same(rank: int, stage: int, dtype: torch.dtype) -> None:
    dense = _weights(rank, stage, dtype, sparse=False)
    for sparse, expected in zip(_weights(rank, stage, dtype, sparse=True), dense, strict=True):
        torch.testing.assert_close(sparse, expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_that_of_dense_gradients(stage: int, dtype: torch.dtype) -> None:
    run_ranks(2, _check_same, stage, dtype)


def _check_assigned(rank: int) -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=1.0, stage=2, topology=topology(2))
    model.weight.grad = torch.eye(2).to_sparse() * 2 * rank
    optimizer.step()
    assert torch.equal(model.weight, -torch.eye(2))
    optimizer.close()


def test_a_sparse_gradient_can_be_assigned() -> None:
    run_ranks(2, _check_assigned)


def test_an_optimizer_for_sparse_gradients_is_refused() -> None:
    model = nn.Embedding(ROWS, WIDTH, sparse=True)
    with pytest.raises(ConfigError, match="SparseAdam"):
        ZeroOptimizer(model, torch.optim.SparseAdam(list(model.parameters())))
