"""The flag that GPU kernels clear: when it is copied and read, with fake events that the test completes."""

# covers zcomm/_kernels/message_flags.py

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._kernels import message_flags, on_triton
from zcomm._kernels.message_flags import MessageFlag, check_all_flags, flag_of
from zcomm.errors import MessageError, StateError

CPU = torch.device("cpu")


class Gpu:
    """A fake of the CUDA calls that the flags make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_passed, self.captures, self.now_s = True, False, 100.0
        self.log: list[str] = []
        monkeypatch.setattr(MessageFlag, "is_capturing", staticmethod(lambda: self.captures))
        monkeypatch.setattr(MessageFlag, "on_device", staticmethod(lambda _: nullcontext()))
        monkeypatch.setattr(MessageFlag, "new_event", staticmethod(lambda: self))
        monkeypatch.setattr(MessageFlag, "clock", staticmethod(lambda: self.now_s))
        flags: dict[torch.device, MessageFlag] = {}
        monkeypatch.setattr(message_flags, "_FLAGS", lambda: flags)

    def record(self) -> None:
        assert not self.captures, "a copy and an event in the graph"
        self.log.append("copy")

    def query(self) -> bool:
        assert not self.captures, "an event query on a stream that is captured"
        self.log.append("query")
        return self.has_passed

    def take(self) -> list[str]:
        """Return the calls since the last time."""
        log, self.log[:] = list(self.log), []
        return log


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_decode_asks_for_nothing_but_now_and_then(gpu: Gpu) -> None:
    flag = flag_of(CPU)
    for _ in range(100):
        assert flag.used_by("all_gather") is flag_of(CPU).tensor
    assert gpu.take() == ["copy"]
    gpu.now_s += 0.2
    for _ in range(100):
        flag.used_by("all_gather")
    assert gpu.take() == ["query", "copy"]


def test_a_gpu_far_behind_is_asked_but_not_copied_from(gpu: Gpu) -> None:
    flag = flag_of(CPU)
    flag.used_by("all_gather")
    gpu.has_passed = False
    gpu.take()
    for _ in range(5):
        gpu.now_s += 0.2
        flag.used_by("all_gather")
    assert gpu.take() == ["query"] * 5


def test_a_cleared_flag_is_an_error_of_a_later_call_once(gpu: Gpu) -> None:
    flag = flag_of(CPU)
    flag.used_by("reduce_scatter").zero_()
    check_all_flags()  # starts the copy
    with pytest.raises(
        MessageError, match=r"a message of reduce_scatter has another layout than this rank expects: .*CHECK=1"
    ):
        check_all_flags()
    check_all_flags()
    check_all_flags()
    assert flag.tensor.item() == 1


def test_the_last_look_waits_but_not_for_ever(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        gpu.now_s += seconds
        gpu.has_passed = gpu.now_s > 100.5

    monkeypatch.setattr(time, "sleep", sleep)
    gpu.has_passed = False
    flag_of(CPU).used_by("all_to_all").zero_()
    with pytest.raises(MessageError, match="all_to_all"):
        check_all_flags(is_last=True)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(gpu, "now_s", gpu.now_s + seconds))
    gpu.has_passed = False
    check_all_flags(is_last=True)
    assert gpu.now_s < 110


def test_nothing_is_asked_in_a_capture_and_what_its_graph_finds_is_seen_later(gpu: Gpu) -> None:
    flag = flag_of(CPU)
    flag.used_by("all_gather")
    gpu.captures = True
    gpu.now_s += 1
    captured = flag.used_by("all_gather")
    check_all_flags()
    gpu.captures = False
    captured.zero_()  # a replay
    gpu.now_s += 1
    flag.used_by("all_gather")
    gpu.now_s += 1
    with pytest.raises(MessageError, match="all_gather"):
        flag.used_by("all_gather")


def test_a_flag_is_not_first_made_in_a_capture(gpu: Gpu) -> None:
    gpu.captures = True
    with pytest.raises(StateError, match="the first zcomm call on cpu cannot be captured"):
        flag_of(CPU)
    gpu.captures = False
    assert flag_of(CPU).tensor.item() == 1


def test_a_decode_on_a_gpu_is_one_launch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No assertion kernel follows it; the kernel gets the device's flag."""
    launched: list[Tensor] = []
    messages = _OnGpu(torch.zeros(2, 1))
    layout: MessageLayout = layout_of("all_gather", get_format("int8"), torch.float32, 1, 10)
    monkeypatch.setattr(on_triton, "flag_of", lambda _: flag_of(CPU))
    for _ in range(10):
        on_triton.launch_checked(lambda *_, is_valid: launched.append(is_valid), messages, layout)  # type: ignore[arg-type]
    assert [given is flag_of(CPU).tensor for given in launched] == [True] * 10
    assert gpu.take() == ["copy"]


class _OnGpu:
    """The part of a CUDA tensor's interface that is used."""

    def __init__(self, values: Tensor) -> None:
        self.device, self.values = torch.device("cuda", 0), values


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_a_flag_outlives_the_mode_it_was_made_in(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    with mode():
        flag = flag_of(CPU)
    flag.used_by("all_gather")
    check_all_flags()
    flag.tensor.zero_()
    check_all_flags()
    with pytest.raises(MessageError, match="a message of all_gather"):
        check_all_flags()
