"""Compile kernels without a GPU and return their machine code: Triton's, and those of cpp/cuda by nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gpu_static_sass import Access, Code, parse_code
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm.triton_kernels import _run, launch

__all__ = ["CUDA_TILE", "NUM_SUMMED", "OPERATIONS", "Kernel", "cuda_kernels", "missing_tools", "triton_kernel"]

NUM_SUMMED = 8
OPERATIONS = ("quantize", "decode", "decode_sum", "requantize")
NUMEL = 1 << 22
CUDA_TILE, CUDA_THREADS_OF_TILE = 1024, 32
CUDA_FOLDER = Path(__file__).parents[1] / "cpp"
CUDA_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-prec-div=true", "-ftz=false")
CUDA_SOURCES = {"quantize": "quantize.cu", "decode": "decode.cu", "requantize": "requantize.cu"}
CUDA_CODECS = {"int8": "Int8Codec", "int4": "Int4Codec", "nf4": "Nf4Codec", "fp8_e4m3": "Fp8Codec"}
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32",
}  # fmt: skip
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Kernel(NamedTuple):
    """The code of one kernel, and the work of a thread for its part of a tile."""

    code: Code
    num_registers: int
    elements: int
    """Elements of a thread."""
    access: Access
    """Bytes accessed with one message, in accesses of four bytes and more."""
    message_nbytes: int
    """Bytes loaded for each further message."""
    nbytes: float
    """Bytes from and to device memory, per element of the result."""


def _tool(name: str) -> str:
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(own) if own.exists() else shutil.which(name) or ""


def missing_tools() -> list[str]:
    """Return the missing tools of those that disassembly needs."""
    return [name for name in ("nvdisasm", "cuobjdump", "ptxas") if not _tool(name)]


def _read(cubin: Path) -> tuple[dict[str, Code], dict[str, int]]:
    """Read the code and the number of registers of each function."""
    text = subprocess.run([_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    usage = subprocess.run([_tool("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return parse_code(text), {name: int(n) for name, n in re.findall(r"Function (\S+):\s+REG:(\d+)", usage)}


def _nbytes(layout: MessageLayout, operation: str) -> float:
    """Bytes of device memory for an element, of a bfloat16 array and as many messages as the operation has."""
    message = layout.nbytes / layout.numel
    return {
        "quantize": 2 + message,
        "decode": message + 2,
        "decode_sum": NUM_SUMMED * message + 2,
        "requantize": (NUM_SUMMED + 1) * message,
    }[operation]


def _access(operation: str, elements: int, bits: int) -> Access:
    codes, values = elements * bits // 8, 2 * elements
    return {
        "quantize": Access(values, codes),
        "decode": Access(codes, values),
        "decode_sum": Access(codes, values),
        "requantize": Access(codes, codes),
    }[operation]


def _call(operation: str, layout: MessageLayout) -> None:
    x, device = torch.empty(NUMEL, dtype=torch.bfloat16), torch.device("cpu")
    is_valid, message = torch.ones(1, dtype=torch.int32), layout.new(1, device)
    messages = layout.new(NUM_SUMMED, device)
    if operation == "quantize":
        launch.quantize(x, layout, message, 0, 0)
    elif operation == "decode":
        launch.decode(message, layout, x, 0, 0, is_valid=is_valid)
    elif operation == "decode_sum":
        launch.decode_sum(messages, layout, x, NUMEL, NUM_SUMMED, is_valid=is_valid)
    else:
        launch.decode_sum_requantize(messages, layout, message, layout, is_valid=is_valid)


@contextmanager
def _launches() -> Iterator[list[Launch]]:
    """Record launches inside the block instead of launching."""
    recorded: list[Launch] = []
    real_launch = _run._launch
    _run._launch = lambda kernel, _, arguments, constants, *__: recorded.append((kernel, arguments, constants))
    try:
        yield recorded
    finally:
        _run._launch = real_launch


def compiled(launched: Launch, tile: int, warps: int, target: GPUTarget, *, fused: bool = False) -> Any:
    """Compile as a launch does: specialize on ints of 1 and multiples of 16, unless the parameter forbids it.

    ``fused``: multiplications may be fused with additions, which the launchers forbid.
    """
    kernel, arguments, constants = launched
    known: dict[str, Any] = constants | {"TILE": tile}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        value = known[name] if name in known else arguments[index]
        may_specialize = not kernel.params[index].do_not_specialize
        if name in known or value is None or (isinstance(value, int) and value == 1 and may_specialize):
            signature[name], known[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and may_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "enable_fp_fusion": fused}
    return triton.compile(ASTSource(kernel, signature, known, attributes), target=target, options=options)


def triton_kernel(operation: str, format: str, arch: int) -> tuple[int, int, Kernel]:
    """Return elements, warps and code of the largest program, for bfloat16 values aligned to 16 bytes."""
    layout = layout_of("static", get_format(format), torch.bfloat16, 1, NUMEL)
    with _launches() as recorded:
        _call(operation, layout)
    tile, warps = _run.candidates_of(recorded[0][0])[-1]
    kernel = compiled(recorded[0], tile, warps, GPUTarget("cuda", arch, 32))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        codes, registers = _read(cubin)
    elements, bits = tile // (32 * warps), layout.codec.bits
    name = kernel.metadata.name
    found = Kernel(
        codes[name], registers[name], elements, _access(operation, elements, bits), elements * bits // 8,
        _nbytes(layout, operation),
    )  # fmt: skip
    return tile, warps, found


def cuda_kernels(arch: int) -> Iterator[tuple[str, str, Kernel]]:
    """Yield operation, format and kernel for all block codecs."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return
    for source_operation, source in CUDA_SOURCES.items():
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernels.cubin"
            subprocess.run(
                [nvcc, *CUDA_FLAGS, f"-I{CUDA_FOLDER / 'include'}", f"-I{CUDA_FOLDER}", f"-arch=sm_{arch}", "-cubin",
                 "-o", cubin, CUDA_FOLDER / "cuda" / source], check=True, capture_output=True,
            )  # fmt: skip
            codes, registers = _read(cubin)
        operations = ("decode", "decode_sum") if source_operation == "decode" else (source_operation,)
        for operation in operations:
            yield from _cuda_rows(operation, codes, registers)


def _cuda_rows(operation: str, codes: dict[str, Code], registers: dict[str, int]) -> Iterator[tuple[str, str, Kernel]]:
    for format, codec in CUDA_CODECS.items():
        name = next(name for name in codes if codec in name)
        layout = layout_of("static", get_format(format), torch.bfloat16, 1, NUMEL)
        elements, bits = CUDA_TILE // CUDA_THREADS_OF_TILE, layout.codec.bits
        yield operation, format, Kernel(
            codes[name], registers[name], elements, _access(operation, elements, bits), elements * bits // 8,
            _nbytes(layout, operation),
        )  # fmt: skip
