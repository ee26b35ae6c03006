"""transformers' GPT-2 under install_ddp and install_fsdp2: losses and bytes, compared with torch's own communication.

``python bench/drop_in.py`` is the full comparison, 300 steps per case; its exit code reports a failure.
"""

# covers bench/beside.py bench/contenders/ddp.py

from __future__ import annotations

import json

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks

SCRIPT = str(ROOT / "bench" / "drop_in.py")
SHORT = ["--json", "--recipes=zeropp", "--steps=12", "--batch-size=2", "--tolerance=0.2"]
LIMITS = {"ddp": 0.40, "fsdp2": 0.45}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_short_run_learns_with_two_fifths_of_the_bytes() -> None:
    """The scripts compare losses and bytes with their limits themselves: exit code 0 means both hold."""
    runs = [[SCRIPT, f"--engine={engine}", *SHORT] for engine in LIMITS]
    lines = run_on_forks(4, runs, cwd=ROOT, timeout_s=450).splitlines()
    rows = {row["case"]: row for line in lines if line.startswith("{") and "case" in (row := json.loads(line))}
    for engine, limit in LIMITS.items():
        assert rows[f"{engine} zeropp"]["loss"] < 4.5  # the logarithm of 256 is 5.5
        assert rows[f"{engine} zeropp"]["ratio"] <= limit
