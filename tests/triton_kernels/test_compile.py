"""Every kernel compiles ahead of time for real GPUs, without one, and the compiled code keeps the contract.

The numerics contract stands on three things that only the compiled code shows: no fused multiply-add, IEEE division,
and denormals that are kept.
"""

# covers triton_kernels/launch.py

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm.triton_kernels import _run, launch

BENCH = Path(__file__).parents[2] / "bench"
NVIDIA = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]
AMD = GPUTarget("hip", "gfx942", 64)
LARGEST_SHARED_NBYTES = 99 * 1024  # of a block, on every GPU from sm_80 on
FORMATS = ["int8", "int4", "nf4", "fp8_e4m3", "int8:asym", "int4:asym"]


class Launches:
    """Records what the launchers would launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], int, int]] = []
        monkeypatch.setattr(_run, "_launch", self._take)

    def _take(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], cols: int, *_: Any
    ) -> None:
        tile, warps = max(cols, 2048), max(4, min(32, cols // 512))
        assert grid({"TILE": tile})[0] > 0
        self.taken.append(((kernel, arguments, constants), tile, warps))

    def compiled(self, target: GPUTarget, *, fused: bool = False) -> list[Any]:
        """Compile everything recorded since the last call, for ``target``."""
        from gpu_static_kernels import compiled

        kernels = [compiled(*launched, target, fused=fused) for launched in self.taken]
        self.taken.clear()
        assert kernels
        return kernels


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.syspath_prepend(str(BENCH))
    return Launches(monkeypatch)


def _layout(format: str, num_segments: int = 1, numel: int = 4096) -> MessageLayout:
    return layout_of("test", get_format(format), torch.bfloat16, num_segments, numel)


def _draw(format: str, first: int) -> Draw | None:
    return Draw(1, 2, 3, first=first) if get_format(format).is_random else None


def _encode(format: str, dtype: torch.dtype = torch.bfloat16, *, numel: int = 4096, **options: Any) -> None:
    layout = _layout(format, 2, numel)
    x = torch.zeros(2 * 2 * numel, dtype=dtype)
    first = options.pop("first", 0)
    launch.quantize(x, layout, layout.new(2, x.device), 2 * numel, numel, _draw(format, first), **options)


def _decode(format: str, dtype: torch.dtype = torch.bfloat16, *, numel: int = 4096, added: bool = False) -> None:
    layout, is_valid = _layout(format, 2, numel), torch.ones(1, dtype=torch.int32)
    out = torch.zeros(2 * 2 * numel, dtype=dtype)
    launch.decode(layout.new(2, out.device), layout, out, 2 * numel, numel, is_valid=is_valid, added=added)


def _reduce(format: str, out_format: str, *, residual: bool = False, numel: int = 4096) -> None:
    layout, out_layout, is_valid = _layout(format, 2, numel), _layout(out_format, 1, numel), torch.ones(1)
    messages, out = layout.new(3, is_valid.device), out_layout.new(2, is_valid.device)
    blocks = _residual(2, numel) if residual else None
    flag = torch.ones(1, dtype=torch.int32)
    for divisor in (2, 3):  # by product, by division
        launch.decode_sum(messages, layout, torch.zeros(2 * numel), numel, divisor, is_valid=flag)
    draw = _draw(out_format, 0)
    launch.decode_sum_requantize(messages, layout, out, out_layout, draw, is_valid=flag, residual=blocks)


def _residual(num_rows: int, numel: int) -> launch.ResidualArguments:
    codes = torch.zeros(num_rows, -(-numel // 256), 256, dtype=torch.int8)
    return launch.ResidualArguments(codes, torch.zeros(codes.shape[:2], dtype=torch.bfloat16), 0.9)


def _instructions(kernel: Any) -> set[str]:
    """The instructions, except those of the package's inline assembly, which test_ptx.py executes."""
    compiled = re.sub(r"// begin inline asm.*?// end inline asm", "", kernel.asm["ptx"], flags=re.DOTALL)
    return set(re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.:]*)", compiled, re.MULTILINE))


def _check(kernels: list[Any]) -> None:
    """Check the compiled kernels against the numerics contract."""
    for kernel in kernels:
        found = _instructions(kernel)
        assert not [i for i in found if i.startswith(("fma", "mad.f", "mad.rn", "rcp"))], kernel.name
        assert not [i for i in found if ".ftz" in i or ".approx" in i or ".full" in i], kernel.name
        assert kernel.asm["cubin"][:4] == b"\x7fELF"
        assert kernel.metadata.shared <= LARGEST_SHARED_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
def test_quantize_and_decode(target: GPUTarget, launches: Launches) -> None:
    for format in FORMATS:
        _encode(format)
        _decode(format)
    _encode("int8", torch.float32)
    _decode("int8", torch.float16)
    _encode("int4/48", numel=1001)  # nothing is aligned, blocks are no powers of two
    _decode("int4/48", numel=1001)
    _encode("bf16", torch.float32)
    _decode("fp16")
    _check(launches.compiled(target))


@pytest.mark.slow
@pytest.mark.parametrize("target", NVIDIA, ids=lambda target: f"sm_{target.arch}")
def test_sums_and_options(target: GPUTarget, launches: Launches) -> None:
    _reduce("int4", "int4")
    _reduce("int8", "nf4", residual=True)
    _reduce("none", "int8")
    _reduce("int8", "bf16")
    _encode("int4:hadamard")
    _decode("int4:hadamard")
    _encode("int4:stochastic")
    _encode("int4:stochastic", first=1)
    _encode("int4", torch.float32, held=torch.zeros(4 * 4096, dtype=torch.bfloat16))
    _encode("nf4", torch.float32, residual=_residual(4, 4096))
    _decode("int4", added=True)
    _check(launches.compiled(target))


@pytest.mark.slow
def test_the_largest_blocks_fit(launches: Launches) -> None:
    for format in ("int8/65536", "nf4/65534", "int4/16384:asym:hadamard"):
        _encode(format, numel=65536)
        _decode(format, numel=65536)
    _reduce("int8/65536", "int4/2", numel=65536)
    _check(launches.compiled(NVIDIA[0]))


@pytest.mark.slow
def test_amd(launches: Launches) -> None:
    for format in (*FORMATS, "int4:hadamard"):
        _encode(format)
        _decode(format)
    _reduce("int8", "nf4", residual=True)
    for kernel in launches.compiled(AMD):
        assert kernel.asm["hsaco"][:4] == b"\x7fELF"
        assert not re.search(r"\b(contract|fast|afn|arcp|llvm\.fma|llvm\.fmuladd)\b", kernel.asm["llir"]), kernel.name
        if kernel.name == "decode_kernel":  # the others divide, which takes v_fma
            assert not re.search(r"v_(pk_)?(fma|fmac|mad|mac)_f32", kernel.asm["amdgcn"])


def test_texts_of_each_architecture(launches: Launches) -> None:
    """The hardware converts to e4m3 from sm_89 on; tables are permutations everywhere; registers do not spill."""
    for capability, converts in ((80, False), (90, True)):
        _encode("fp8_e4m3")
        _encode("nf4")
        fp8, nf4 = launches.compiled(GPUTarget("cuda", capability, 32))
        assert ("e4m3x2" in fp8.asm["ptx"]) is converts
        assert nf4.asm["ptx"].count("prmt.b32") > 20


def test_fusion_would_be_noticed(launches: Launches) -> None:
    """The launchers disable fusion, which Triton enables by default."""
    _encode("int8:asym")
    _check(launches.compiled(NVIDIA[1]))
    _encode("int8:asym")
    with pytest.raises(AssertionError, match="fma"):
        _check(launches.compiled(NVIDIA[1], fused=True))
