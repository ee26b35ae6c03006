"""NCCL is found where it should be, and its absence is explained. ZCOMM_TEST_NCCL=PATH: with a real one, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zcomm import nccl_library
from zcomm.errors import BackendUnavailableError

REAL = os.environ.get("ZCOMM_TEST_NCCL", "")


def _environment_report(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "zcomm", "env"], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    return next(line for line in done.stdout.splitlines() if 'NCCL of backend="nccl"' in line)


def test_an_unusable_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_text("no library")
    monkeypatch.setattr(nccl_library.env, "value", lambda name: str(path) if name == "ZCOMM_NCCL" else "auto")
    nccl_library.nccl_library.cache_clear()
    with pytest.raises(BackendUnavailableError, match=rf"(?s){path}.*nccl-cu12.*ZCOMM_NCCL"):
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


@pytest.mark.skipif(not REAL, reason="ZCOMM_TEST_NCCL=PATH names an NCCL to try")
def test_a_real_library_resolves_and_tells_its_version() -> None:
    line = _environment_report(ZCOMM_NCCL=REAL)
    assert REAL in line
    assert "buffers can be registered" in line
