"""Every input of the corpus, fixed findings included, is accepted or raises a named error."""

# covers tests/fuzz/targets.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.run import CORPUS, NATIVE, run_one
from tests.fuzz.targets import make_targets

INPUTS = [path for path in sorted(CORPUS.glob("*/*")) if path.parent.name not in NATIVE]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_an_input_of_the_corpus_is_taken_or_refused_by_name(targets: Any, path: Path) -> None:
    assert run_one(targets[path.parent.name], path.read_bytes()) is None
