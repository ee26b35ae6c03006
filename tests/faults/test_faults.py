"""A few faults of each run of the suite, drawn anew; the table of results says what the definition says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults.__main__ import References, run_one
from tests.faults.definition import FAULTS, draw_spec

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("ZERO_TEST_FAULT_SEED", int.from_bytes(os.urandom(2), "little")))
KINDS = [name for name, fault in FAULTS.items() if "forked" in fault.modes and name != "SIGSTOP"]  # that one waits 10 s

REFERENCES = References()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("first", [0, 1])
def test_a_fault_is_an_error_and_the_next_start_goes_on(first: int) -> None:
    """One fault of each half of the table, another in every run."""
    kinds = KINDS[first::2]
    seeds = [SEED * 100 + i for i in range(100)]
    seed = next(seed for seed in seeds if draw_spec(seed, "forked")["fault"] == kinds[SEED % len(kinds)])
    line = run_one("forked", seed, REFERENCES)
    assert line["outcome"] == "ok", json.dumps(line)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_fault_under_torchrun() -> None:
    line = run_one("torchrun", SEED * 20, REFERENCES)
    assert line["outcome"] == "ok", json.dumps(line)


def test_the_results_say_what_must_follow() -> None:
    text = (ROOT / "bench" / "results" / "faults.md").read_text()
    for name, fault in FAULTS.items():
        for mode in fault.modes:
            assert f"| {name} ({mode}) | {fault.what} | {fault.must} |" in text
