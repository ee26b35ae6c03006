"""On a GPU the host does not wait for the device in a step, but where a number is needed on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from zero import ZeroOptimizer

DEVICE = torch.device("cuda", 0)
NUM_STEPS, WARM_UP = 6, 3


@contextmanager
def _syncs_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who waited: what torch knows to be a wait is an error, the explicit ones are written down."""
    seen: list[str] = []
    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
        before = owner.synchronize

        def synchronize(*args: object, _before: object = before, _name: str = owner.__name__) -> None:
            seen.append(_name)
            _before(*args)  # type: ignore[operator]

        monkeypatch.setattr(owner, "synchronize", synchronize)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")
        monkeypatch.undo()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own, when it is switched on
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_step_does_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, stage: int, *, is_quantized: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(DEVICE, torch.bfloat16)
    options = {"zero_quantized_weights": True, "zero_quantized_gradients": True} if is_quantized else {}
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, stage=stage, **options)
    x = torch.randn(8, 256, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with _syncs_counted(monkeypatch) as seen:
        for _ in range(NUM_STEPS):
            step()
    assert not seen
    optimizer.close()
