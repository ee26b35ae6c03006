"""Copies between host memory and a GPU: on streams of their own, after what was computed, known to the allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recorded_streams import DEVICE, OnDevice, Recorded
from zero.activations.copies import Copies
from zero.tiers.copy_stream import CopyStream
from zero.tiers.host import HostMemory


class Target(Tensor):
    """Says on which stream it is written, and whether the host would wait."""

    recorded: Recorded

    def copy_(self, _: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001  (torch's signature)
        how = "" if non_blocking else ", the host waits"
        self.recorded.log.append(f"copy on {self.recorded.current.name}{how}")
        return self


def _target(recorded: Recorded) -> Any:
    Target.recorded = recorded
    return torch.empty(4).as_subclass(Target)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def _source() -> Any:
    return torch.ones(4).as_subclass(OnDevice)


def test_gradients_go_to_the_host_beside_the_computation(recorded: Recorded) -> None:
    memory = HostMemory(DEVICE, pins=False)
    arrival = memory.fetch_gradient(_source(), _target(recorded))
    assert recorded.log == ["side1 after main", "copy on side1", "event on side1", "tensor until side1"]
    assert recorded.current.name == "main"
    recorded.log.clear()
    arrival.wait()
    assert recorded.log == ["host after event"], "the host needs the values"
    memory.fetch_gradient(_source(), _target(recorded))
    assert recorded.num_streams == 1, "made once"


def test_parameters_come_to_the_device_beside_the_computation(recorded: Recorded) -> None:
    copies = CopyStream(DEVICE)
    with copies.on_stream():
        _target(recorded).copy_(torch.ones(4), non_blocking=True)
    assert copies.event() is not None
    assert recorded.log == ["side1 after main", "copy on side1", "event on side1"]
    assert recorded.current.name == "main"


def test_saved_inputs_go_to_the_host_beside_the_computation(recorded: Recorded) -> None:
    copies = Copies()
    copies.to_host(_source(), _target(recorded))
    assert recorded.log == ["side1 after main", "copy on side1", "tensor until side1"]
    copies.to_host(_source(), _target(recorded))
    assert recorded.num_streams == 1, "one order of all copies"
