"""``bench/compare.py``'s ranks at miniature size, on ranks that stand in for two nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks

SCRIPT = str(ROOT / "bench" / "compare_ranks.py")
KEY = "float32 network loopback"
TINY = ["--num-layers=1", "--hidden-size=32", "--seq-length=16", "--batch-size=1", "--ranks-per-node=2", f"--key={KEY}"]
SYSTEMS = ["fsdp2 reshard=True", "zero stage 3"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_systems_take_turns_and_a_second_run_takes_the_rest(tmp_path: Path) -> None:
    store = tmp_path / "store.json"
    first = [SCRIPT, *TINY, f"--store={store}", "--rounds=1", "--systems", *SYSTEMS]
    second = [SCRIPT, *TINY, f"--store={store}", "--rounds=2", "--systems", *SYSTEMS, "zero stage 3 nvme"]
    run_on_forks(4, [first, second], cwd=ROOT)
    run = json.loads(store.read_text())["runs"][KEY]
    assert run["running"] == ""
    assert run["tokens"] == 4 * 16
    plain, ours, refused = (run["systems"][name] for name in [*SYSTEMS, "zero stage 3 nvme"])
    for system in (plain, ours):
        assert len(system["seconds"]) == len(system["wire_nbytes"]) == 2
        assert min(system["wire_nbytes"]) > 2 * run["numel"]
        assert not system["error"]
    assert sorted(plain["losses"]) == ["1", "2"]
    assert plain["losses"] == pytest.approx(ours["losses"], abs=5e-5)
    assert ours["units"] == pytest.approx(6, rel=0.15)  # float32: twice the three of bfloat16
    assert "nvme" in refused["error"]  # no folder was named: the failure is a row
    assert refused["seconds"] == []
