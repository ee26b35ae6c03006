"""Analyze the kernels' machine code without a GPU: registers, spills, instructions, and the rate that they allow.

    python bench/gpu_static.py [--archs 80,90,100] [--formats int8,int4] [--output FILE]

The Triton kernels, and with nvcc those of cpp/cuda, are compiled and disassembled. Each row shows what a thread
executes per element on the fast path of its tile (defined in gpu_static_sass.py), and what share of the rate of device
memory (HBM) that allows if 80 % of all issue slots are used:

    share = min(1, 0.8 * lane instructions a second / weight of an element / (HBM bytes a second / bytes of an element))

An instruction weighs 128 over the lanes of its arithmetic unit, so an integer instruction, at half rate, weighs 2;
memory accesses, shuffles, special functions and control weigh 1. The weights are added up, as if units never worked in
parallel. Arrays are bfloat16 and aligned to 16 bytes; sums are of 8 messages; requantization is to the format of the
messages; Triton programs are the largest that tuning tries. The fast path of the CUDA kernels is not counted (nan), as
their paths depend on dtype and block at run time.

This is an estimate, not a gate: measurements on a GPU take precedence.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gpu_static_kernels import NUM_SUMMED, OPERATIONS, Kernel, cuda_kernels, missing_tools, triton_kernel
from gpu_static_sass import Instruction

__all__ = ["GPUS", "Gpu", "Row", "main", "row_of", "weight_of"]

FORMATS = ("int8", "int4", "nf4", "fp8_e4m3")
ISSUED_SHARE = 0.8
AIMS = {"int8": 0.85, "int4": 0.85, "fp8_e4m3": 0.80, "nf4": 0.70}
"""Goals of the share, for quantize and decode on sm_90."""
LANES = 128
"""Lanes that the four schedulers of a multiprocessor issue to in a cycle: a warp each."""
# Lanes a cycle by unit: NVIDIA's CUDA programming guide, table of the throughput of native arithmetic instructions, of
# compute capability 8.0, 9.0 and 10.0: integers, comparisons, selections, permutations and packing conversions at 64.
FLOAT32 = frozenset({"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2"})
OTHER_UNITS = frozenset({
    "LDG", "STG", "LDS", "STS", "LDL", "STL", "LDSM", "STSM", "LDC", "S2R", "CS2R", "R2UR", "SHFL", "REDUX", "MUFU",
    "I2F", "F2I", "FCHK", "BRA", "EXIT", "BSSY", "BSYNC", "BAR", "RET", "CALL", "WARPSYNC", "DEPBAR", "YIELD", "MEMBAR",
})  # fmt: skip
"""Memory, shuffles, special functions and control take one issue slot and no arithmetic unit."""


@dataclass(frozen=True)
class Gpu:
    """The rates of one GPU."""

    name: str
    lane_instructions_per_s: float
    hbm_nbytes_per_s: float
    float32_lanes: int
    """Lanes per cycle and multiprocessor; other arithmetic has ``other_lanes``."""
    source: str
    other_lanes: int = 64


GPUS = {
    80: Gpu("A100 80 GB SXM", 19.5e12, 2.04e12, 64,
            "data sheet: 19.5 TFLOPS float32 from 64 of 128 lanes, two a lane; 2,039 GB/s"),
    90: Gpu("H100 SXM", 29.6e12, 3.35e12, 128, "132 multiprocessors x 128 lanes x 1.755 GHz; data sheet: 3.35 TB/s"),
    100: Gpu("B200 (HGX)", 37.5e12, 8.0e12, 128, "data sheet: 75 TFLOPS float32, two a lane; 8 TB/s"),
}  # fmt: skip


def weight_of(instruction: Instruction, gpu: Gpu) -> float:
    """Return the issue slots that an instruction takes, or keeps its arithmetic unit busy for."""
    name = instruction.name
    if name in OTHER_UNITS or name.startswith("U"):
        return 1
    return LANES / (gpu.float32_lanes if name in FLOAT32 else gpu.other_lanes)


@dataclass(frozen=True)
class Row:
    """A kernel on an architecture."""

    backend: str
    operation: str
    format: str
    arch: int
    tile: str
    num_registers: int
    spilled_nbytes: int
    num_static: float
    """Instructions of the full kernel, per element of a thread."""
    instructions: float
    weight: float
    """Weight of the fast path per element; NaN if no fast path was found."""
    nbytes: float

    @property
    def share(self) -> float:
        """Share of the rate of device memory; NaN without a fast path."""
        if math.isnan(self.weight):
            return self.weight
        gpu = GPUS[self.arch]
        of_issue = ISSUED_SHARE * gpu.lane_instructions_per_s / self.weight
        return min(1.0, of_issue * self.nbytes / gpu.hbm_nbytes_per_s)

    def line(self) -> str:
        """Return the row of the Markdown table."""
        aim = AIMS.get(self.format, 0.0) if self.arch == 90 and self.operation in ("quantize", "decode") else 0.0
        verdict = (
            ""
            if not aim
            else "not counted"
            if math.isnan(self.share)
            else f"{aim:.2f} met"
            if self.share >= aim
            else f"{aim:.2f} **missed**"
        )
        return (
            f"| {self.backend} | {self.operation} | {self.format} | {self.tile} | {self.num_registers} "
            f"| {self.spilled_nbytes} | {self.num_static:.1f} | {self.instructions:.1f} | {self.weight:.1f} "
            f"| {self.nbytes:.2f} | {self.share:.2f} | {verdict} |"
        )


HEADER = (
    "| kernels | operation | format | tile/warps | registers | spilled B | static/el | fast/el | weight/el | B/el "
    "| share of HBM | aim |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def row_of(backend: str, operation: str, format: str, arch: int, tile: str, kernel: Kernel) -> Row:
    """Analyze the code of one kernel."""
    sums = operation in ("decode_sum", "requantize")
    path = None if backend == "CUDA" else kernel.code.fast_path(
        kernel.access, lambda instruction: weight_of(instruction, GPUS[arch]),
        num_messages=NUM_SUMMED if sums else 1, message_nbytes=kernel.message_nbytes,
    )  # fmt: skip
    instructions, weight = path or (float("nan"), float("nan"))
    n = kernel.elements
    return Row(
        backend, operation, format, arch, tile, kernel.num_registers, kernel.code.spilled_nbytes,
        len(kernel.code.instructions) / n, instructions / n, weight / n, kernel.nbytes,
    )  # fmt: skip


def _triton_rows(arch: int, formats: tuple[str, ...]) -> Iterator[Row]:
    for operation in OPERATIONS:
        for format in formats:
            tile, warps, kernel = triton_kernel(operation, format, arch)
            yield row_of("Triton", operation, format, arch, f"{tile}/{warps}", kernel)


def _cuda_rows(arch: int, formats: tuple[str, ...]) -> Iterator[Row]:
    for operation, format, kernel in cuda_kernels(arch):
        if format in formats:
            yield row_of("CUDA", operation, format, arch, "1024/1", kernel)


def _report(archs: list[int], formats: tuple[str, ...]) -> Iterator[str]:
    yield "# Kernels, by their machine code"
    yield ""
    yield "`python bench/gpu_static.py --output bench/results/gpu_static.md`; no GPU ran. What the columns mean"
    yield "is explained at the top of bench/gpu_static.py; `static` counts a kernel's full code, `fast` what a thread"
    yield "executes for a tile, `weight` the same with 2 for each instruction at half rate; all for an element."
    for arch in archs:
        gpu = GPUS[arch]
        yield from ("", f"## sm_{arch}: {gpu.name}", "")
        rates = (
            f"{gpu.lane_instructions_per_s / 1e12:.1f}e12 lane instructions/s, {gpu.hbm_nbytes_per_s / 1e12:.2f} TB/s"
        )
        yield f"{rates} ({gpu.source})."
        yield from ("", HEADER)
        for row in chain(_triton_rows(arch, formats), _cuda_rows(arch, formats)):
            yield row.line()


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; return 1 if a tool is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default="80,90,100", help="comma separated, of 80, 90 and 100 (all)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma separated (all four block codecs)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the tables to this file")
    chosen = parser.parse_args(arguments)
    if missing := missing_tools():
        print(f"cannot disassemble: {', '.join(missing)} missing (Triton's package contains them)", file=sys.stderr)
        return 1
    lines = []
    for line in _report([int(arch) for arch in chosen.archs.split(",")], tuple(chosen.formats.split(","))):
        print(line, flush=True)
        lines.append(line)
    if chosen.output:
        chosen.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
