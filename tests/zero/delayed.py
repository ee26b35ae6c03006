"""Training with delayed updates, for tests."""

from __future__ import annotations

import threading
import time
from typing import Any

from torch import Tensor, nn

import zero
from tests.zero.models import batch, loss_of

LAST = 1
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "delayed_update": True, "delay_start": 0}


def nvme(folder: str, **options: Any) -> dict[str, Any]:
    ahead = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 3}
    return (
        CPU | {"offload_optimizer": {"device": "nvme", "nvme_path": folder} | ahead, "sub_group_size": 1601} | options
    )


class Gated(zero.CPUAdam):
    """In a thread, update k (from 0) waits until the step that needs it has started: the latest possible moment."""

    num_steps_begun = 0

    def step_tensor_(self, param: Tensor, *args: Any, **kwargs: Any) -> None:
        deadline, number = time.monotonic() + 20, int(self.state[param].get("step", 0))
        while threading.current_thread() is not threading.main_thread() and Gated.num_steps_begun < number + 2:
            assert time.monotonic() < deadline, "no later step has begun"
            time.sleep(1e-4)
        super().step_tensor_(param, *args, **kwargs)


def train_late(model: nn.Module, optimizer: Any, rank: int, steps: range, **case: Any) -> list[float]:
    losses, num_micro = [], case.get("gradient_accumulation_steps", 1)
    scheduler = case.get("scheduler")
    for step in steps:
        for micro in range(num_micro):
            loss = loss_of(model, *batch(step, micro, rank)) / num_micro
            optimizer.scale(loss).backward()
            losses.append(loss.item())
        Gated.num_steps_begun += 1
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: zero.utils.safe_get_full_fp32_param(p).to(p.dtype) for name, p in model.named_parameters()}
