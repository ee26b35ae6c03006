"""``bench/call_cost.py`` prints a row for each call, with the ratio of the two times beside it."""

# covers zcomm/_bench/torch_calls.py zcomm/_bench/harness.py

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "call_cost.py"


def test_rows_compare_each_call_with_those_of_torch() -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    rows = [row for line in done.stdout.splitlines() if "call" in (row := json.loads(line))]
    calls = [
        f"{name} {wire}"
        for wire in ("none", "int8")
        for name in ("all_gather_single", "all_to_all_single", "all_reduce")
    ]
    assert [row["call"] for row in rows] == calls
    for row in rows:
        assert row["ratio"] == pytest.approx(row["cpu_us"] / row["torch_us"])
        assert row["torch_us"] > 0
