"""Fakes of CUDA streams for machines without a GPU: they record the calls made on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from zcomm._transport.work import Steps

__all__ = ["DEVICE", "OnDevice", "Recorded"]

DEVICE = torch.device("cuda", 0)


class Recorded:
    """A fake of torch.cuda's streams and events, and of tensors there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        OnDevice.log = self.log
        self.current = Stream("main", self)
        self.num_streams = 0
        self.priorities: list[int] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: self.current)
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))

    def _new_stream(self, _: torch.device, priority: int = 0) -> Stream:
        self.num_streams += 1
        self.priorities.append(priority)
        return Stream(f"side{self.num_streams}", self)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _set(self, stream: Stream) -> None:
        self.current = stream

    def steps(self, name: str, error: Exception | None = None) -> Steps:
        """A collective that records the stream it runs on."""
        self.log.append(f"{name} on {self.current.name}")
        yield None
        if error is not None:
            raise error


class Stream:
    def __init__(self, name: str, recorded: Recorded) -> None:
        self.name, self._recorded = name, recorded

    def wait_stream(self, other: Stream) -> None:
        self._recorded.log.append(f"{self.name} after {other.name}")

    def record_event(self) -> Event:
        event = Event(self._recorded)
        event.record(self)
        return event


class Event:
    has_passed = True

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def query(self) -> bool:
        return self.has_passed

    def record(self, stream: Stream) -> None:
        self._recorded.log.append(f"event on {stream.name}")

    def wait(self, stream: Stream) -> None:
        self._recorded.log.append(f"{stream.name} after event")

    def synchronize(self) -> None:
        self._recorded.log.append("host after event")


class OnDevice(Tensor):
    """A CPU tensor that claims to be on the GPU."""

    device = DEVICE
    is_cuda = True
    log: list[str]

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.log.append(f"tensor until {stream.name}")
