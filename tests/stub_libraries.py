"""Builds stub libraries in place of NCCL and NVIDIA's driver, when a test needs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

STUB_NCCL = Path(__file__).parents[1] / "cpp" / "tests" / "stub_nccl.cc"
DRIVER = 'extern "C" int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}\n'


def _compiled(source: Path, library: Path, *options: str) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile a stub library with")
    library.parent.mkdir(parents=True, exist_ok=True)
    name = f"-Wl,-soname,{library.name}"
    subprocess.run(["g++", "-shared", "-fPIC", name, *options, str(source), "-o", str(library)], check=True)
    return library


def stub_nccl(folder: Path, version: int) -> Path:
    """Build a ``libnccl.so.2`` that reports ``version`` (22907: 2.29.7) and has every function."""
    options = f"-DSTUB_VERSION={version}", "-DSTUB_HAS_REGISTRATION"
    return _compiled(STUB_NCCL, folder / "libnccl.so.2", *options)


def stub_driver(folder: Path, version: int) -> Path:
    """Build a ``libcuda.so.1`` that reports CUDA ``version`` (12040: 12.4)."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "driver.cc"
    source.write_text(DRIVER.format(version=version))
    return _compiled(source, folder / "libcuda.so.1")
