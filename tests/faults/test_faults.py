"""Runs a few faults a day, chosen by the date, and checks that the page of results agrees with its log."""

# covers tests/faults/definition.py tests/faults/forked.py

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.conftest import SUMMARY_LINE
from tests.faults.__main__ import LOG, MARKED, OUTCOMES, PAGE, ROOT, References, read_log, run_one, tables
from tests.faults.definition import CONFIGS, FAULTS, LOST_PEER, draw_spec
from tests.faults.forked import wrong_errors
from tests.rotation import DAY

A_DAY = {"forked": 2, "torchrun": 1, "network": 1}
"""Runs a day: each kind of fault recurs after 9 days on forks, 14 under torchrun, 2 with the network cut."""

REFERENCES = References()


def _check(mode: str, which: int, record_property: Callable[[str, object], None]) -> None:
    seed = DAY * A_DAY[mode] + which
    spec = draw_spec(seed, mode)
    drawn = f"{mode}, run {seed} (ZERO_TEST_DAY={DAY}): {spec['fault']}, {spec['config']}"
    line = run_one(mode, seed, REFERENCES)
    if line["outcome"] == "skipped":
        pytest.skip(f"{drawn}: {line['problems'][0]}")
    record_property(SUMMARY_LINE, f"fault of the day, {drawn}: {line['outcome']}")
    assert line["outcome"] == "ok", f"{drawn}: {json.dumps(line)}"


@pytest.mark.timeout(280)
@pytest.mark.parametrize("which", range(A_DAY["forked"]))
def test_a_fault_is_an_error_and_the_next_start_goes_on(
    which: int, record_property: Callable[[str, object], None]
) -> None:
    _check("forked", which, record_property)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_fault_under_torchrun(record_property: Callable[[str, object], None]) -> None:
    _check("torchrun", 0, record_property)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_network_that_is_cut(record_property: Callable[[str, object], None]) -> None:
    _check("network", 0, record_property)


@pytest.mark.parametrize("mode", A_DAY)
def test_every_fault_has_every_configuration_in_turn(mode: str) -> None:
    kinds = [name for name, fault in FAULTS.items() if mode in fault.modes]
    begin = DAY * A_DAY[mode]
    for first in (0, begin):
        specs = [draw_spec(seed, mode) for seed in range(first, first + len(kinds) * len(CONFIGS))]
        drawn = {(spec["fault"], spec["config"]) for spec in specs}
        assert drawn == {(kind, name) for kind in kinds for name in CONFIGS if re.search(FAULTS[kind].only, name)}
        assert {spec["fault"] for spec in specs[: len(kinds)]} == set(kinds)


def test_the_page_is_what_the_log_says() -> None:
    """The tables are made from the log, and each of its lines has the outcome that its errors imply."""
    lines = read_log(LOG)
    found = MARKED.search(PAGE.read_text())
    assert found is not None
    assert found[0] == tables(lines) + "\n"
    for line in lines:
        assert line["outcome"] in OUTCOMES
        assert {"fault", "config", "victim", "step", "at", "source", "took_s", "errors", "problems"} <= line.keys()
        assert (line["outcome"] == "ok") == (not line["problems"]), line


def test_the_judge_takes_no_other_error() -> None:
    spec = {"fault": "SIGKILL", "config": "stage 1", "victim": 1}
    taken = [("CommunicationError", "all_gather failed"), ("DivergedError", "the ranks make different calls"),
             ("CheckpointError", "CommunicationError: broadcast failed")]  # fmt: skip
    refused = [("RuntimeError", "Connection closed by peer"), ("DistBackendError", ""), ("StateError", "rank 1: gone"),
               ("CheckpointError", "RuntimeError: closed"), ("CommunicationErrors", "")]  # fmt: skip
    for error, text in taken + refused:
        problems = list(wrong_errors(spec, {0: {"error": error, "text": text}}, set()))
        assert bool(problems) == ((error, text) in refused), (error, text)
    assert list(wrong_errors(spec, {}, set())) == ["rank 0 has no error"]
    assert list(wrong_errors(spec, {}, {0})) == []


def test_only_errors_that_the_guarantees_name_pass() -> None:
    """Ranks without a fault of their own may raise only the errors that the guarantees name."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    (named,) = re.findall(r"^- \*\*Errors have names\*\*.*?(?=^- |\n\n)", page, re.MULTILINE | re.DOTALL)
    (lost,) = re.findall(r"^- \*\*A lost rank\*\*.*?(?=^- |\n\n)", page, re.MULTILINE | re.DOTALL)
    taken = {name for fault in FAULTS.values() for name in re.findall(r"\w+Error", fault.survivors)}
    assert taken == set(re.findall(r"`(\w+Error)`", lost + named))
    assert set(re.findall(r"\w+Error", LOST_PEER)) == set(re.findall(r"`(\w+Error)`", lost))
