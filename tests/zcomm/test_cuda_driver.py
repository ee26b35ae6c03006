"""A driver that is missing or too old is one named error on every rank, before NCCL is used."""

# covers zcomm/_kernels/on_cuda.py

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.stub_libraries import stub_driver
from zcomm import BackendUnavailableError, report
from zcomm._base import env
from zcomm._kernels import kernels, on_cuda
from zcomm._kernels.on_cuda import driver_unavailable_reason
from zcomm._transport import backend_choice, nccl_communicators
from zcomm._transport.topology import hop_of_group

BUILT = "13.0.88 for 80-real, 90-real"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    on_cuda.driver_cuda.cache_clear()
    yield
    on_cuda.driver_cuda.cache_clear()


def _drive(monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int] | None) -> None:
    monkeypatch.setattr(on_cuda, "driver_cuda", lambda: cuda)


@pytest.mark.parametrize(
    ("cuda", "built", "expected"),
    [
        (None, BUILT, r"no NVIDIA driver \(libcuda.so.1\): install driver 580 or later"),
        ((12, 9), BUILT, r"too old: CUDA 12.9.*built with CUDA 13.0\. Install driver 580 or later.*Triton's"),
        ((12, 9), "14.1.0", r"too old.*Install a driver of CUDA 14.0 or later, or compile them with CUDA 12"),
        ((13, 0), "13.2.1 for 90-real", "^$"),  # a minor version older is as good
        ((14, 0), BUILT, "^$"),
        ((12, 0), "12.8.93", "^$"),
        (None, "", "^$"),  # a build without CUDA asks for no driver
    ],
)
def test_what_a_driver_serves(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int] | None, built: str, expected: str
) -> None:
    _drive(monkeypatch, cuda)
    assert re.search(expected, driver_unavailable_reason(built)), driver_unavailable_reason(built)


@pytest.mark.parametrize(("version", "text"), [(12040, "CUDA 12.4"), (13010, "CUDA 13.1"), (0, "none: there is")])
def test_the_driver_is_asked(tmp_path: Path, version: int, text: str) -> None:
    folder, file = stub_driver(tmp_path, version).parent, on_cuda.__file__
    done = subprocess.run(
        [sys.executable, "-c", f"import runpy; print(runpy.run_path({file!r})['driver_description']())"],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(text)


def test_cuda_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _drive(monkeypatch, (12, 4))
    monkeypatch.setattr(on_cuda.calls, "module", SimpleNamespace(build_info=lambda: {"cuda": BUILT}))
    monkeypatch.setattr(on_cuda.calls, "UNBUILT_REASON", "")
    monkeypatch.setattr(env, "value", lambda _: "cuda")
    assert "driver is too old" in on_cuda.unavailable_reason()
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: True)
    assert "ZCOMM_KERNELS=cuda, but the NVIDIA driver is too old" in kernels.unavailable_reason()


def test_the_report_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _drive(monkeypatch, None)
    monkeypatch.setattr(report.kernels, "native", lambda: SimpleNamespace(build_info=lambda: {"cuda": BUILT}))
    assert "nvidia-driver-580" in report._described(report._cuda_unavailable_reason, str)


def _fake_native() -> Any:
    return SimpleNamespace(NcclCommunicator=object, build_info=lambda: {"cuda": BUILT})


def _check_all_are_told(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_choice.kernels, "native", _fake_native)
        patch.setattr(backend_choice, "nccl_library", lambda: None)
        _drive(patch, (12, 4) if rank == 1 else (13, 0))
        with pytest.raises(BackendUnavailableError, match=r"cannot be used:\n  rank 1: the NVIDIA driver is too old"):
            nccl_communicators.agree_on_nccl(hop_of_group(None))
        _drive(patch, (13, 0))
        nccl_communicators.agree_on_nccl(hop_of_group(None))
    dist.barrier()


def test_an_old_driver_on_one_rank_is_told_to_all() -> None:
    run_ranks(2, _check_all_are_told)
