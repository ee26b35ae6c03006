"""Checks the machine code of the CUDA kernels in the installed library: no GPU is needed.

The bits need IEEE division and no multiplication fused with an addition; the speed, wide accesses and values that stay
in registers.
"""

# covers zcomm/__init__.py

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from zcomm import _native

OPERATIONS = {"Quantizing": 4, "Requantizing": 4, "Decoding": 5}
"""Kernel -> codecs; kernels that decode serve plain arrays, too."""
MAX_LOCAL_ACCESSES = 16
"""Limit of instructions that access a thread's local memory (spills), in kernels of thousands of instructions."""


def _cuobjdump() -> str | None:
    """The path of cuobjdump: CUDA's, or Triton's copy of it."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    copy = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(copy) if copy.is_file() else None


CUOBJDUMP = _cuobjdump()
pytestmark = [
    pytest.mark.skipif(not _native.build_info()["cuda"], reason="built without CUDA"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump, which CUDA and Triton bring along"),
]


@cache
def _dumped(*options: str) -> str:
    assert CUOBJDUMP is not None
    done = subprocess.run([CUOBJDUMP, *options, _native.__file__], capture_output=True, text=True, check=True)
    return done.stdout


def _architectures() -> list[str]:
    return sorted(set(re.findall(r"\.(sm_\d+)\.cubin", _dumped("--list-elf"))), key=lambda name: int(name[3:]))


def test_every_architecture_has_every_kernel() -> None:
    listed = re.findall(r"\d+", _native.build_info()["cuda"].partition(" for ")[2])
    assert _architectures() == [f"sm_{number}" for number in sorted(set(map(int, listed)))]
    ptx = _ptx()  # of some architectures
    num_files = len(OPERATIONS) + 1  # one an operation, and that of changes in ulps
    count = len(re.findall("^Fatbin ptx code", ptx, re.MULTILINE)) // num_files
    expected = {operation: count * codecs for operation, codecs in OPERATIONS.items()}
    assert Counter(re.findall(r"\.entry \S*?KernelINS0_\d+([A-Z][a-z]+)", ptx)) == expected


def _ptx() -> str:
    dumped = _dumped("--dump-ptx")
    if "Fatbin ptx code" not in dumped:
        pytest.skip("built without PTX")
    return dumped


def test_the_arithmetic_is_that_of_the_contract() -> None:
    pattern = r"^\s*(?:@\S+\s+)?((?:fma|mad|div|rcp|mul|add|sub|sqrt)\.\S+)"
    floats: dict[str, Counter[str]] = {operation: Counter() for operation in OPERATIONS}
    for entry in _ptx().split(".entry ")[1:]:
        if "_7_ulps_cu_" in entry.partition("(")[0]:
            assert not re.search(r"\.f(16|32|64)\b", entry), "changes in ulps are integers"
            continue
        operation = re.match(r"\S*?KernelINS0_\d+([A-Z][a-z]+)", entry)
        assert operation is not None, entry[:100]
        floats[operation[1]].update(name for name in re.findall(pattern, entry, re.MULTILINE) if "f32" in name)
    for operation, counts in floats.items():
        # The product of a code and a scale is exact: sums of messages fuse it with the addition, and nothing else.
        fused = set() if operation == "Quantizing" else {"fma.rn.f32"}
        assert set(counts) - {"sub.rn.f32"} == {"div.rn.f32", "mul.rn.f32", "add.rn.f32"} | fused, (operation, counts)
    assert sum(counts["div.rn.f32"] for counts in floats.values()) >= 2 * sum(OPERATIONS.values())
    assert ".ftz" not in _ptx()
    assert ".approx" not in _ptx()
    # the same to the assembler, which could fuse what PTX does not
    assert _ptx().count("--fmad false") == _ptx().count("Fatbin ptx code") > 0


@pytest.fixture(scope="module")
def machine_code() -> dict[str, Counter[str]]:
    """Kernel -> count of each instruction, for one architecture."""
    known = _architectures()
    chosen = "sm_90" if "sm_90" in known else known[-1]
    kernels: dict[str, Counter[str]] = {}
    for part in _dumped("--dump-sass", "--gpu-architecture", chosen).split("Function : ")[1:]:
        name, _, text = part.partition("\n")
        kernels[name] = Counter(re.findall(r"/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?([A-Z][A-Z0-9_.]*)", text))
    return kernels


def test_whole_tiles_move_in_16_bytes(machine_code: dict[str, Counter[str]]) -> None:
    of_blocks = {name: counts for name, counts in machine_code.items() if "_7_ulps_cu_" not in name}
    assert len(of_blocks) == sum(OPERATIONS.values()) < len(machine_code)
    for name, counts in of_blocks.items():
        loads = sum(count for op, count in counts.items() if op.startswith("LDG") and ".128" in op)
        stores = sum(count for op, count in counts.items() if op.startswith("STG") and ".128" in op)
        if "_10Quantizing" in name:
            assert loads >= 12, (name, loads)  # 8 of float32, 4 of a narrower dtype
        if "Decoding" in name:
            assert stores >= 12, (name, stores)


def test_values_stay_in_registers(machine_code: dict[str, Counter[str]]) -> None:
    for name, counts in machine_code.items():
        local = {op: count for op, count in counts.items() if op.startswith(("LDL", "STL"))}
        assert sum(local.values()) <= MAX_LOCAL_ACCESSES, (name, local)
