"""On a GPU the host waits for the device in a step only where it needs a number."""

# covers zero/optimizer.py

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from zero import ZeroOptimizer

DEVICE = torch.device("cuda", 0)
NUM_STEPS, WARM_UP = 6, 3


@contextmanager
def _syncs_counted(monkeypatch: pytest.MonkeyPatch, mode: str = "error") -> Iterator[list[str]]:
    """Count waits: torch's sync debug mode reports those that it knows, and explicit ones are recorded."""
    seen: list[str] = []
    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
        before = owner.synchronize

        def synchronize(*args: object, _before: object = before, _name: str = owner.__name__) -> None:
            seen.append(_name)
            _before(*args)  # type: ignore[operator]

        monkeypatch.setattr(owner, "synchronize", synchronize)
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")
        monkeypatch.undo()


def _steps_of(optimizer: ZeroOptimizer, model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Runs one step at a time; repeat until the number of waits is steady."""
    x = torch.randn(8, 256, device=DEVICE, dtype=dtype)

    def step() -> None:
        optimizer.scale(model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    return step


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(DEVICE, dtype)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own, when it is switched on
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_does_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, stage: int, *, is_quantized: bool, clips: bool
) -> None:
    model = _model(torch.bfloat16)
    options = {"zero_quantized_weights": is_quantized, "zero_quantized_gradients": is_quantized}
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, lr=1e-3, fused=True, stage=stage, gradient_clipping=1e-3 * clips, **options
    )
    step = _steps_of(optimizer, model, torch.bfloat16)
    with _syncs_counted(monkeypatch) as seen:
        for _ in range(NUM_STEPS):
            step()
    assert not seen
    assert (optimizer.last_grad_norm is not None) == clips
    optimizer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_in_fp16_waits_for_the_overflow_alone(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    model = _model(torch.float16)
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, lr=1e-3, fused=True, stage=stage, gradient_clipping=1e-3,
        fp16={"enabled": True, "initial_scale_power": 8},
    )  # fmt: skip
    step = _steps_of(optimizer, model, torch.float16)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with _syncs_counted(monkeypatch, "warn") as seen:
            for _ in range(NUM_STEPS):
                step()
    waits = [str(w.message) for w in warned if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == NUM_STEPS, waits
    assert not seen
    optimizer.close()
