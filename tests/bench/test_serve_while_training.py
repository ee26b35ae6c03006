"""A server that follows a training on two ranks gives better answers, and says of which version they are."""

# covers zero/_publish/publisher.py zero/_publish/subscriber.py

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forks import run_on_forks

SCRIPT = Path(__file__).parents[2] / "bench" / "serve_while_training.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_is_served_follows_its_training(tmp_path: Path) -> None:
    options = ["--stage", "3", "--steps", "60", "--ask-every", "30"]
    printed = run_on_forks(2, [[str(SCRIPT), *options]], cwd=tmp_path, timeout_s=250)
    found = re.findall(r"step (\d+), .*version (\d+): \[(\d+), .*\] -> \[(.*)\]", printed)
    assert [int(step) for step, *_ in found] == [30, 60], printed
    assert all(0 < int(version) <= int(step) for step, version, *_ in found), printed
    first, answer = int(found[-1][2]), found[-1][3]
    assert answer == ", ".join(str(first + 3 + i) for i in range(4)), "it has learned to count"
