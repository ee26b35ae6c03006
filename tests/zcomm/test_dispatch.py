"""Which kernels serve a call, on every instruction set of the binary, and the behaviour when there are none."""

# covers zcomm/_base/env.py zcomm/_formats/reference.py zcomm/_formats/formats.py zcomm/_kernels/codec_support.py

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forks import run_on_forks
from tests.processes import ROOT, run_python
from tests.zcomm import oracle
from tests.zcomm.data import mixture, same_values
from tests.zcomm.oracle import Wire
from zcomm import _native
from zcomm._base import env
from zcomm._formats import reference
from zcomm._formats.formats import CODECS, FORMATS, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._kernels import kernels, on_cuda
from zcomm.errors import BackendUnavailableError

ALL_OPERATIONS = """
import torch, zcomm
from tests.zcomm.oracle import Wire
from tests.zcomm.data import mixture, same_values
from zcomm import _native
from zcomm._formats import reference
from zcomm._kernels import kernels
from zcomm._formats.formats import FORMATS
from zcomm._formats.message import layout_of

assert _native.isa() == {isa!r}, _native.isa()
for name in ("int8", "int4"):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in (1, 2, 127, 128, 129, 255, 257, 1000, 2053):
            layout, last = (layout_of("test", FORMATS[name], dtype, segments, numel) for segments in (2, 1))
            x = mixture(3 * 2 * numel, numel, dtype)
            results = []
            for module in (reference, kernels):
                messages, out = layout.new(3, x.device).fill_(7), last.new(2, x.device).fill_(7)
                values, total = torch.empty(3 * 2 * numel, dtype=dtype), torch.empty(2 * numel, dtype=dtype)
                module.quantize(x, layout, messages, 2 * numel, numel)
                module.decode(messages, layout, values, 2 * numel, numel)
                module.decode_sum(messages, layout, total, numel, 3)
                module.decode_sum_requantize(messages, layout, out, last)
                results.append((messages, values, total, out))
            for expected, got in zip(*results):
                assert same_values(got, expected), (name, dtype, numel)
print("equal")
"""


@pytest.mark.parametrize("isa", _native.build_info()["isa_levels"])
def test_every_instruction_set_equals_the_reference(isa: str, tmp_path: Path) -> None:
    levels = _native.build_info()["isa_levels"]
    if levels.index(isa) < levels.index(_native.isa()):
        pytest.skip(f"this CPU has {_native.isa()}, not {isa}")
    script = tmp_path / "all_operations.py"
    script.write_text(ALL_OPERATIONS.format(isa=isa))
    assert run_on_forks(1, [[str(script)]], cwd=ROOT, ZCOMM_ISA=isa) == "equal\n"


def test_float64_is_rounded_once_to_float32_by_block_formats() -> None:
    x = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = layout_of("test", FORMATS["int8"], torch.float64, 1, 300)
    message = layout.new(1, x.device)
    kernels.quantize(x, layout, message, 0, 0)
    assert bytes(message[0].tolist()) == oracle.encode([x.numpy().astype(np.float32)], Wire("int8", 256), "test")
    decoded = torch.empty(300, dtype=torch.float64)
    kernels.decode(message, layout, decoded, 0, 0)
    assert np.array_equal(decoded.numpy(), oracle.decode([x.float().numpy()], Wire("int8", 256))[0].astype(np.float64))


@pytest.mark.parametrize(("setting", "asks"), [("native", True), ("reference", False), ("auto", True)])
def test_the_setting_chooses_the_kernels(setting: str, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    calls: list[str] = []
    monkeypatch.setenv("ZCOMM_KERNELS", setting)
    monkeypatch.setattr(_native, "quantize", lambda *_: calls.append("native"))
    for cached in (env.value, kernels._native_is_chosen):
        cached.cache_clear()
    layout = layout_of("test", FORMATS["int8"], torch.float32, 1, 64)
    kernels.quantize(torch.zeros(64), layout, layout.new(1, torch.device("cpu")), 0, 0)
    for cached in (env.value, kernels._native_is_chosen):
        cached.cache_clear()
    assert bool(calls) == asks


def test_missing_native_kernels() -> None:
    script = "import sys; sys.modules['zcomm._native'] = None\nimport torch, zcomm\n"
    call = "x, out = torch.full((8,), 127.0), torch.empty(8)\n"
    call += "zcomm.all_gather_single(out, x, zcomm.Topology.single(), format='int8')\n"
    done = run_python(script + call + "print(out.tolist())", ZCOMM_KERNELS="auto")
    assert "[127.0" in done.stdout, done.stderr
    done = run_python(script + call, ZCOMM_KERNELS="native")
    assert "BackendUnavailableError: ZCOMM_KERNELS=native, but the native module is not built" in done.stderr
    assert "pip install" in done.stderr
    assert issubclass(BackendUnavailableError, RuntimeError)


def _of_own_codec(chosen: str) -> MessageLayout:
    """A layout of nf4 under another name and number, which no kernel has."""
    return MessageLayout("test", replace(CODECS["nf4"], name="own", number=999), 64, 1, 300, kernels=chosen)


def test_a_codec_that_no_kernel_has_runs_on_the_reference() -> None:
    x = mixture(300, 1)
    decoded = []
    for layout in (_of_own_codec("auto"), layout_of("test", FORMATS["nf4"], torch.float32, 1, 300)):
        message = layout.new(1, x.device)
        kernels.quantize(x, layout, message, 0, 0)
        decoded.append(torch.empty(300))
        kernels.decode(message, layout, decoded[-1], 0, 0)
    assert same_values(*decoded)
    assert not kernels._uses_native(x, _of_own_codec("auto"), layout)
    assert not kernels.fuses_residual(x, _of_own_codec("auto"))


@pytest.mark.parametrize(
    ("chosen", "device"), [("native", "cpu"), ("triton", "cpu"), ("triton", "cuda"), ("cuda", "cuda")]
)
def test_kernels_that_are_asked_for_but_lack_a_codec_are_an_error(chosen: str, device: str) -> None:
    array: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    layout = _of_own_codec(chosen)
    with pytest.raises(BackendUnavailableError, match=f"kernels='{chosen}', but these .* codec own"):
        assert kernels._gpu_kernels(array, layout) or kernels._uses_native(array, layout)


@pytest.mark.parametrize(
    ("chosen", "device"), [("auto", "cuda"), ("native", "cuda"), ("cuda", "cpu"), ("reference", "cpu")]
)
def test_kernels_that_are_not_asked_for_leave_a_codec_to_the_reference(chosen: str, device: str) -> None:
    array: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    layout = _of_own_codec(chosen)
    assert kernels._gpu_kernels(array, layout) is None
    assert not kernels._uses_native(array, layout)


def test_kernels_have_codecs_that_are_declared() -> None:
    declared = {codec.name: codec.number for codec in CODECS.values() if codec.name != "f64"}
    assert _native.CODECS.items() <= declared.items()
    assert kernels.on_triton.KINDS.keys() | on_cuda.CODECS <= declared.keys()


def test_reference_does_not_read_what_it_does_not_write() -> None:
    """Messages are written into uninitialized memory: padding must be written, too."""
    x = mixture(3 * 77, 1)
    layout = layout_of("test", FORMATS["int4"], torch.float32, 3, 77)
    for module in (reference, kernels):
        first, second = layout.new(1, x.device).fill_(0), layout.new(1, x.device).fill_(255)
        module.quantize(x, layout, first, 0, 77)
        module.quantize(x, layout, second, 0, 77)
        assert same_values(first, second)


@given(
    wires=st.tuples(st.sampled_from(sorted(FORMATS)), st.sampled_from(sorted(FORMATS))),
    block=st.sampled_from([2, 6, 32, 128, 256, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 700)),
    gap=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_native_equals_reference_on_any_shape(
    wires: tuple[str, str], block: int, dtype: torch.dtype, shape: tuple[int, int, int], gap: int, seed: int
) -> None:
    num_messages, num_segments, numel = shape
    formats = [get_format(wire, block=block if FORMATS[wire].block else None) for wire in wires]
    layout = layout_of("any", formats[0], dtype, num_segments, numel)
    last = layout_of("any", formats[1], dtype, 1, numel)
    x = mixture(num_messages * num_segments * (numel + gap), seed, dtype)
    strides = (num_segments * (numel + gap), numel + gap)  # rows lie ``gap`` apart, which stays as it was
    results = []
    for module in (reference, kernels):
        messages, out = layout.new(num_messages, x.device).fill_(7), last.new(num_segments, x.device).fill_(7)
        values, total = torch.full_like(x, 7), torch.full((num_segments * (numel + gap),), 7, dtype=dtype)
        module.quantize(x, layout, messages, *strides)
        module.decode(messages, layout, values, *strides)
        module.decode_sum(messages, layout, total, strides[1], 3)
        module.decode_sum_requantize(messages, layout, out, last)
        results.append((_typed(messages, layout.codec.dtype), values, total, _typed(out, last.codec.dtype)))
    for expected, got in zip(*results, strict=True):
        assert same_values(got, expected)


def _typed(messages: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """View plain arrays in their dtype, since the bits of a NaN depend on the hardware."""
    return messages if dtype is None else messages.view(-1).view(dtype)
