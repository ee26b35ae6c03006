"""Models that are not a stack of layers: parameters of odd kinds in odd places, and validation in inference mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.training import full_values, zero_optimizer
from zcomm import LayoutError
from zero import ZeroOptimizer

Loss = Callable[[nn.Module, Tensor], Tensor]
WIDTH = 6


class OddParameters(nn.Module):
    """A scalar, an empty parameter, and lists and dicts of parameters, all used by the root's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])
        self.biases = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weights[0] @ self.weights[1] + self.biases["a"]
        return self.layer(x) * self.scale + self.nothing.sum()


def new_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def validated_in_inference_mode(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        model(x.clone())
    return mean_square(model, x)


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def check_equals_plain_training(rank: int, build: Callable[[], nn.Module], loss: Loss, stage: int) -> None:
    """Two steps of SGD; the oracle is one process on both ranks' inputs."""
    torch.manual_seed(0)
    plain = build().double()
    torch.manual_seed(0)
    model = build().double()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage) as optimizer:
        for step in range(2):
            for other in range(2):
                (loss(plain, inputs(step, other)) / 2).backward()
            reference.step()
            reference.zero_grad()
            loss(model, inputs(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        got = full_values(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "odd parameters": (OddParameters, mean_square),
    "validation in inference mode": (new_mlp, validated_in_inference_mode),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_training(name: str, stage: int) -> None:
    run_ranks(2, check_equals_plain_training, *CASES[name], stage)


def test_frozen_integers() -> None:
    """As quantized base models have them; in a world of one."""
    for stage in (0, 1, 2, 3):
        model = nn.Linear(3, 2)
        model.codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        options = {"stage": stage, "lr": 0.1, "quantized_weights": True}
        if stage == 3:
            with pytest.raises(LayoutError, match=r"'codes' is torch\.uint8; use stage 1 or 2"):
                ZeroOptimizer(model, torch.optim.SGD, **options)
            continue
        optimizer = ZeroOptimizer(model, torch.optim.SGD, **options)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert model.codes.tolist() == [0, 1, 2, 3, 4]
