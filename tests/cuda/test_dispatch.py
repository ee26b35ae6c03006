"""When the CUDA kernels are selected, and which arguments the native module gets. No GPU is needed."""

# covers zcomm/_base/env.py zcomm/_formats/formats.py zcomm/_formats/message.py

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zcomm import _native
from zcomm._base import env
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels, on_cuda, on_triton
from zcomm._kernels import native_calls as calls
from zcomm.errors import BackendUnavailableError, MessageError

HAS_CUDA = bool(_native.build_info()["cuda"])
ON_GPU: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
"""The properties of a tensor that decide which kernels serve it."""


def _layout(name: str, **options: Any) -> MessageLayout:
    return layout_of("test", get_format(name, **options), torch.float32, 1, 1000)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The value of ZCOMM_KERNELS in the test."""
    monkeypatch.setenv("ZCOMM_KERNELS", request.param)
    monkeypatch.setattr(on_cuda, "driver_unavailable_reason", lambda _: "")  # nothing is launched
    for cached in (env.value, on_cuda._is_chosen, on_triton._is_chosen):
        cached.cache_clear()
    yield request.param
    for cached in (env.value, on_cuda._is_chosen, on_triton._is_chosen):
        cached.cache_clear()


@pytest.mark.skipif(not HAS_CUDA, reason="built without CUDA")
@pytest.mark.parametrize("setting", ["cuda"], indirect=True)
def test_what_they_serve(setting: str) -> None:
    for name in ("int8", "int4", "nf4", "fp8_e4m3", "none", "bf16"):
        assert kernels._gpu_kernels(ON_GPU, _layout(name)) is on_cuda, name
    assert on_cuda.serves(ON_GPU, _layout("int8", block=1024), _layout("int4", block=8))
    others = [
        _layout("int8", block=2048), _layout("int8", block=6), _layout("int8", symmetric=False),
        _layout("int4", rotation="hadamard"),
    ]  # fmt: skip
    for layout in others:
        assert not on_cuda.serves(ON_GPU, _layout("int8"), layout), layout
    assert not on_cuda.serves(ON_GPU, _layout("int8"), draw=Draw(1, 2, 3))
    assert not on_cuda.serves(torch.empty(1), _layout("int8"))
    assert kernels.fuses_residual(ON_GPU, _layout("int8"))
    assert not on_cuda.serves(SimpleNamespace(device=ON_GPU.device, dtype=torch.float64), _layout("int8"))


@pytest.mark.skipif(not HAS_CUDA, reason="built without CUDA")
@pytest.mark.parametrize("setting", ["auto", "native"], indirect=True)
def test_without_triton_they_are_the_default(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ZCOMM_KERNELS=cuda" in on_cuda.unavailable_reason()
    assert kernels._gpu_kernels(ON_GPU, _layout("int8")) is on_triton
    on_cuda._is_chosen.cache_clear()
    monkeypatch.setattr(on_triton, "triton_unavailable_reason", lambda _: "Triton is not installed")
    assert kernels._gpu_kernels(ON_GPU, _layout("int8")) is on_cuda


@pytest.mark.parametrize("setting", ["triton", "reference"], indirect=True)
def test_another_setting_excludes_them(setting: str) -> None:
    assert on_cuda.unavailable_reason() == f"ZCOMM_KERNELS={setting}"
    assert not on_cuda.serves(ON_GPU, _layout("int8"))


@pytest.mark.parametrize("setting", ["cuda"], indirect=True)
def test_a_library_without_them_is_an_error(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "module", SimpleNamespace(build_info=lambda: {"cuda": ""}))
    with pytest.raises(BackendUnavailableError, match=r"ZCOMM_KERNELS=cuda, but .* built without CUDA"):
        on_cuda.serves(ON_GPU, _layout("int8"))


@pytest.mark.skipif(not HAS_CUDA, reason="built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a kernel would run")
def test_every_call_reaches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are converted and checked; then CUDA reports a missing device or driver."""
    monkeypatch.setattr(on_cuda, "_launch", lambda name, _, layout, *rest: calls.call(f"cuda_{name}", layout, *rest, 0))
    layout, last = _layout("int8"), _layout("int4")
    x, messages, out = torch.zeros(1000), layout.new(2, torch.device("cpu")), last.new(1, torch.device("cpu"))
    residual = (torch.zeros(1, 4, 256, dtype=torch.int8), torch.zeros(1, 4, dtype=torch.bfloat16), 0.5)
    flag = torch.ones(1, dtype=torch.int32)
    for call in (
        lambda: on_cuda.quantize(x, layout, messages, 0, 0, None),
        lambda: on_cuda.quantize(x, layout, messages, 0, 0, None, held=x.bfloat16()),
        lambda: on_cuda.quantize(x, _layout("bf16"), messages, 0, 0, None, held=x),
        lambda: on_cuda.quantize(x, last, out, 0, 0, None, residual=residual),
        lambda: on_cuda._decode(messages, layout, x, 0, 0, is_valid=flag, added=True),
        lambda: on_cuda._decode_sum(messages, layout, x, 1000, 2, is_valid=flag),
        lambda: on_cuda._requantize(messages, layout, out, last, residual, out, is_valid=flag),
        lambda: on_cuda._requantize(messages, layout, out, last, None, None, is_valid=flag),
        lambda: on_cuda.quantize(x, last, out, 0, 0, None, expected=out),
    ):
        with pytest.raises(RuntimeError, match=r"cudaGetDevice.*: .*(driver|device)"):
            call()
    with pytest.raises(MessageError, match="block=6"):
        on_cuda.quantize(x, _layout("int8", block=6), messages, 0, 0, None)
