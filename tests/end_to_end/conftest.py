"""A fixture that several end-to-end tests compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.job import ROOT, SCRIPT, TINY
from tests.forks import run_on_forks


@pytest.fixture(scope="session")
def stands_in_for_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the main job on one machine, whose ranks stand in for two nodes of two ranks."""
    output = tmp_path_factory.mktemp("stands_in_for_two")
    run_on_forks(4, [[SCRIPT, *TINY, "--ranks-per-node=2", f"--output={output}"]], cwd=ROOT)
    return output
