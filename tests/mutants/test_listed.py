"""Every listed mistake can still be made: the text that it replaces stands in its file once."""

from __future__ import annotations

import pytest

from tests.mutants.listed import MUTANTS, Mutant
from tests.mutants.run import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_its_text_stands_in_its_file_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
