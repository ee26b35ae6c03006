"""Every listed mutant can still be made and run: its text stands in its file once, and its tests exist."""

# covers tests/mutants/listed.py tests/mutants/run.py

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.listed import MUTANTS, Mutant
from tests.mutants.run import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_its_text_stands_in_its_file_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_the_tests_that_mutants_name_exist(request: pytest.FixtureRequest) -> None:
    """Ids as pytest prints them: a test with another parameter has another id."""
    named = {test for mutant in MUTANTS for test in mutant.tests if not test.startswith("cpp/")}
    named -= _with_parts({item.nodeid for item in request.session.items})  # what this run has collected is there
    if not named:
        return
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not named - _with_parts({line for line in done.stdout.splitlines() if "::" in line})


def _with_parts(ids: set[str]) -> set[str]:
    """Tests, the functions of those with parameters, and their files."""
    return ids | {name.partition("[")[0] for name in ids} | {name.partition("::")[0] for name in ids}
