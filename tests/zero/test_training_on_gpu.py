"""On a GPU optimizers of whole tensors train as on the CPU, and published weights are the trained ones, bit for bit."""

# covers zero/_publish/publisher.py zero/_optim/muon.py zero/_optim/lamb.py

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from zero import ZeroOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
NUM_VERSIONS, NUM_STEPS = 12, 6


def _model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 32)
    return nn.Sequential(*layers).to(device, dtype)


def _step(model: nn.Module, optimizer: ZeroOptimizer, seed: int) -> float:
    param = next(model.parameters())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).to(param.device, param.dtype)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _losses(device: torch.device, make: Callable[[nn.Module], ZeroOptimizer]) -> list[float]:
    model = _model(device, torch.float32)
    optimizer = make(model)
    losses = [_step(model, optimizer, seed) for seed in range(NUM_STEPS)]
    optimizer.close()
    return losses


def _muon(model: nn.Module, stage: int) -> ZeroOptimizer:
    matrices, others, _ = zero.split_for_muon(model)
    optimizers = [zero.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    return ZeroOptimizer(model, optimizers, stage=stage)


def _lamb(model: nn.Module, stage: int) -> ZeroOptimizer:
    return ZeroOptimizer(model, zero.Lamb, lr=1e-2, stage=stage)


def _adafactor(model: nn.Module, stage: int) -> ZeroOptimizer:
    return ZeroOptimizer(model, torch.optim.Adafactor, lr=1e-2, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("make", "tolerance"), [(_muon, 2e-3), (_lamb, 1e-4), (_adafactor, 1e-4)])
def test_whole_tensors_are_updated_as_on_the_cpu(make: Any, tolerance: float, stage: int) -> None:
    """Muon's iteration is in bfloat16, whose products differ from device to device."""
    expected = _losses(torch.device("cpu"), lambda model: make(model, stage))
    assert _losses(DEVICE, lambda model: make(model, stage)) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    "options",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_subscribers_have_the_trained_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    model = _model(DEVICE, torch.bfloat16)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3, **options)
    publisher = zero.Publisher(optimizer, str(tmp_path))
    others = [_model(device, torch.bfloat16) for device in (DEVICE, torch.device("cpu"))]
    subscribers = [zero.Subscriber(str(tmp_path), other) for other in others]
    for version in range(NUM_VERSIONS):
        _step(model, optimizer, version)
        publisher.publish(version)
        publisher.wait()
        for subscriber in subscribers:
            subscriber.update()
        with zero.GatheredParameters(list(model.parameters())):
            for other in others:
                for trained, received in zip(model.parameters(), other.parameters(), strict=True):
                    assert torch.equal(trained.cpu().view(torch.int16), received.cpu().view(torch.int16)), version
    publisher.close()
    optimizer.close()
