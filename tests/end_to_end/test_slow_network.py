"""``bench/slow_network.py`` at miniature size, on ranks that stand in for two nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks

SCRIPT = str(ROOT / "bench" / "slow_network.py")
SHORT = ["--json", "--num-layers=1", "--hidden-size=64", "--seq-length=16", "--rounds=2"]
PLAIN = "fsdp2 reshard=True"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def _rows(printed: str) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {row["case"]: row for row in rows if "case" in row}


def test_every_system_takes_its_turns() -> None:
    systems = [
        "alone",
        "alone x4",
        PLAIN,
        "ddp",
        "ddp bf16 gradients",
        "zero stage 3",
        "zero++",
        "zero++ x4",
        "delta-hpz",
    ]
    printed = run_on_forks(4, [[SCRIPT, *SHORT, "--systems", *systems]], cwd=ROOT)
    rows = _rows(printed)
    assert list(rows) == systems
    assert not any(row["num_wrong"] for row in rows.values())
    for name in systems:
        assert "step_ms" in rows[name], printed
        row, batches = rows[name], 4 if name.endswith("x4") else 1
        assert row["tokens_per_s"] == pytest.approx(4 * 16 * batches / row["step_ms"] * 1e3)
        assert ("units" in row) == name.startswith(("zero", "delta"))
        assert ("share" in row) != name.startswith("alone")
        assert "wire_mb" not in row
    assert rows[PLAIN]["vs_fsdp2"] == 1.0
    assert rows["zero stage 3"]["units"] == pytest.approx(3, rel=0.05)
    assert rows["delta-hpz"]["units"] < 0.75 * rows["zero++"]["units"]
    assert rows["zero++"]["units"] < 0.27 * rows["zero stage 3"]["units"]
