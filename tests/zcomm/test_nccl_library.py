"""NCCL is found where it should be; errors explain why it is not. ZCOMM_TEST_NCCL=PATH: also a real one."""

# covers zcomm/_transport/nccl_library.py

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.stub_libraries import stub_nccl
from zcomm._transport import backend_choice, nccl_communicators, nccl_library
from zcomm._transport.topology import hop_of_group
from zcomm.errors import BackendUnavailableError

REAL = os.environ.get("ZCOMM_TEST_NCCL", "")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    nccl_library._forget()
    yield
    nccl_library._forget()


def _environment_report(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "zcomm", "env"], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return next(line for line in done.stdout.splitlines() if 'NCCL of backend="nccl"' in line)


def test_an_unusable_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_text("no library")
    monkeypatch.setattr(nccl_library.env, "value", lambda name: str(path) if name == "ZCOMM_NCCL" else "auto")
    with pytest.raises(BackendUnavailableError, match=rf"(?s){path}.*nccl-cu1.*ZCOMM_NCCL"):
        nccl_library.nccl_library()


def test_a_wheel_is_found_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    for name in ("nvidia", "nvidia.nccl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nccl_library._candidates()[:1] == [str(library)]


def test_the_report_says_why_there_is_none() -> None:
    assert "none: NCCL cannot be loaded" in _environment_report(ZCOMM_NCCL="/no/such/library.so")


def _use(monkeypatch: pytest.MonkeyPatch, path: Path | str) -> None:
    monkeypatch.setattr(nccl_library.env, "value", lambda name: str(path) if name == "ZCOMM_NCCL" else "auto")
    # of another test's library
    monkeypatch.setattr(nccl_library, "_refuse_another", lambda _: None)


def test_an_older_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = stub_nccl(tmp_path, 21304)
    _use(monkeypatch, path)
    with pytest.raises(BackendUnavailableError, match=rf"(?s){path}, NCCL 2.13.4 is too old: at least 2.14.0.*install"):
        nccl_library.nccl_library()


def test_a_newer_one_than_was_tested_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = stub_nccl(tmp_path, 24001)
    _use(monkeypatch, path)
    with pytest.warns(RuntimeWarning, match=rf"NCCL 2.40.1, {path}, newer than the newest tested, 2\.\d+$"):
        nccl_library.nccl_library()
    assert nccl_library.nccl_description().endswith("newer than the newest tested, 2.32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nccl_library.nccl_library()
        nccl_library._forget()
        monkeypatch.setattr(nccl_library, "dist", SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1))
        nccl_library.nccl_library()


LOAD_BESIDE = """
import ctypes, os, sys
from zcomm._base import env
from zcomm._transport import nccl_library
ctypes.CDLL(sys.argv[1])
for chosen in sys.argv[2:]:
    os.environ["ZCOMM_NCCL"] = chosen
    env.forget()
    nccl_library._forget()
    try:
        print(nccl_library.nccl_library().path)
    except nccl_library.BackendUnavailableError as error:
        print(f"refused: {error}")
"""


def test_two_in_one_process_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "torch")
    of_torch, mine = stub_nccl(tmp_path / "torch", 22907), stub_nccl(tmp_path / "mine", 23001)
    chosen = [str(of_torch), "", str(tmp_path / "link" / of_torch.name), str(mine)]
    words = [sys.executable, "-c", LOAD_BESIDE, str(of_torch), *chosen]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[:3] == [str(of_torch)] * 3
    assert printed[3].startswith(f"refused: two NCCL libraries are loaded in this process: {of_torch}, and {mine} for")
    assert f"unset ZCOMM_NCCL, or start with LD_PRELOAD={mine}" in printed[3]


def _check_all_are_told(rank: int, folder: str) -> None:
    native = SimpleNamespace(**vars(nccl_library.kernels.native()))
    native.NcclCommunicator, native.build_info = object, lambda: {"cuda": "13.0"}
    with pytest.MonkeyPatch.context() as patch:
        _use(patch, Path(folder) / ("old" if rank == 1 else "new") / "libnccl.so.2")
        patch.setattr(nccl_library.kernels, "native", lambda: native)
        patch.setattr(backend_choice, "driver_unavailable_reason", lambda _: "")
        nccl_library._forget()
        with pytest.raises(BackendUnavailableError, match=r"cannot be used:\n  rank 1: \S+, NCCL 2.13.4 is too old"):
            nccl_communicators.agree_on_nccl(hop_of_group(None))
    dist.barrier()


def test_an_older_one_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    stub_nccl(tmp_path / "old", 21304)
    stub_nccl(tmp_path / "new", 22907)
    run_ranks(2, _check_all_are_told, str(tmp_path))


@pytest.mark.skipif(not REAL, reason="ZCOMM_TEST_NCCL=PATH names an NCCL to try")
def test_a_real_library_resolves_and_tells_its_version() -> None:
    line = _environment_report(ZCOMM_NCCL=REAL)
    assert REAL in line
    assert "buffers can be registered" in line
