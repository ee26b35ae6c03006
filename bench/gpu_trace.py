"""Count the kernels and copies that one call launches, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["Event", "Launches", "count_launches", "traced"]


class Event(NamedTuple):
    """A kernel or copy on the GPU, with its start and end in microseconds."""

    name: str
    start: float
    end: float

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy or a fill, not a kernel."""
        return self.name.startswith(("Memcpy", "Memset"))


class Launches(NamedTuple):
    """Numbers of kernels and copies that a call has launched."""

    kernels: int
    copies: int


def traced(call: Callable[[], object], device: torch.device, path: Path | None = None) -> list[Event]:
    """Run ``call`` under the profiler and write the trace to ``path``. On the CPU there are no events and no trace."""
    if device.type != "cuda":
        call()
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    return [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def count_launches(events: Iterable[Event]) -> Launches | None:
    """Count kernels, and copies or fills; None without events, as the profiler then does not support this GPU."""
    of_copy = [event.is_copy for event in events]
    return Launches(of_copy.count(False), of_copy.count(True)) if of_copy else None
