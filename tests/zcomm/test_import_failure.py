"""A native module of another Python, processor or C library is one named error, on every rank."""

# covers zcomm/_kernels/native_calls.py

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from zcomm import BackendUnavailableError, ConfigError, Topology, _native
from zcomm._kernels import kernels
from zcomm._kernels.native_calls import import_failure
from zcomm._transport import environment_check

ROOT = Path(__file__).parents[2]
ERROR = ImportError("cannot import name '_native'")
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
USE = """
import torch
from zcomm import report
from zcomm._kernels import kernels
from zcomm._formats.formats import get_format
from zcomm._formats.message import layout_of
print(report.collect()["available"]["native"])
layout = layout_of("test", get_format("int8"), torch.float32, 1, 1000)
kernels.quantize(torch.ones(1000), layout, layout.new(1, torch.device("cpu")), 0, 0)
print("quantized")
"""


def test_a_tree_that_was_not_built_is_no_misfit(tmp_path: Path) -> None:
    found = import_failure(ERROR, [str(tmp_path)])
    assert not found.is_incompatible
    assert "not built" in found.reason


@pytest.mark.parametrize(
    ("name", "built_for"),
    [
        ("_native.cpython-310-x86_64-linux-gnu.so", "CPython 3.10 on x86_64-linux-gnu"),
        ("_native.cpython-313t-aarch64-linux-gnu.so", "CPython 3.13t on aarch64-linux-gnu"),
        ("_native.abi3.so", "CPython 3.12 or later"),
    ],
)
def test_it_is_said_what_was_built_and_what_is_here(tmp_path: Path, name: str, built_for: str) -> None:
    (tmp_path / name).touch()
    reason, is_incompatible = import_failure(ERROR, ["/no/such/folder", str(tmp_path)])
    assert is_incompatible
    here = f"CPython {sys.version_info.major}.{sys.version_info.minor}"
    assert re.search(rf"{name} is built for {re.escape(built_for)}; this is {here}\S* on \S+ with ", reason), reason
    assert "pip install --force-reinstall" in reason


def _installed(folder: Path, name: str, content: bytes) -> dict[str, str]:
    """An environment whose zcomm has ``content`` as its native module."""
    shutil.copytree(ROOT / "zcomm", folder / "zcomm", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "triton_kernels", folder / "zcomm" / "triton_kernels")
    (folder / "zcomm" / name).write_bytes(content)
    others = [path for path in sys.path if path.endswith("-packages")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *others]), "PYTHONDONTWRITEBYTECODE": "1"}


def _run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # -S: an editable install of this project must not go first
    words = [sys.executable, "-S", "-c", USE]
    folder = environment["PYTHONPATH"].partition(os.pathsep)[0]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_a_newer_glibc_is_asked_for(tmp_path: Path) -> None:
    content = Path(_native.__file__).read_bytes()
    assert b"\0GLIBC_2.14\0" in content
    environment = _installed(tmp_path, f"_native{SUFFIX}", content.replace(b"\0GLIBC_2.14\0", b"\0GLIBC_9.99\0"))
    used = _run(environment)
    assert re.match(r"none: the native module does not fit: .*GLIBC_9\.99", used.stdout), used
    assert "BackendUnavailableError: the native module does not fit" in used.stderr
    assert "quantized" not in used.stdout
    slow = _run(environment | {"ZCOMM_KERNELS": "reference"})
    assert slow.stdout == "none: ZCOMM_KERNELS=reference\nquantized\n", slow.stderr


EXPECTED = {
    (1,): "usable kernels is as set on rank 0 and the native module does not fit: a test; or set .* on rank 1$",
    (0, 1): "^the native module does not fit: a test; or set ZCOMM_KERNELS=reference, which is slow$",
}
"""Number of ranks with a broken module -> the error on every rank."""


def _check_refused(rank: int) -> None:
    for wrong_on in EXPECTED:
        with pytest.MonkeyPatch.context() as patch:
            if rank in wrong_on:
                patch.setattr(kernels.calls, "UNBUILT_REASON", "the native module does not fit: a test")
                patch.setattr(kernels.calls, "IS_INCOMPATIBLE", True)
            environment_check._COMPARED.clear()
            with pytest.raises((ConfigError, BackendUnavailableError)) as raised:
                Topology(ranks_per_node=2)
            assert re.search(EXPECTED[wrong_on], str(raised.value)), raised.value
    Topology(ranks_per_node=2).close()
    dist.barrier()


def test_every_rank_refuses_it_before_anything_is_exchanged() -> None:
    run_ranks(2, _check_refused)
