"""transformers' GPT-2 under install_ddp and install_fsdp2: loss and bytes beside torch's own communication.

``python bench/drop_in.py`` is the whole comparison, 300 steps a case, and fails by its exit code.
"""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.job import ROOT, run_script

SCRIPT = str(ROOT / "bench" / "drop_in.py")
pytestmark = pytest.mark.slow


def _rows(*arguments: str) -> dict[str, dict[str, float]]:
    """The script's rows by case; it has ended with exit code 0, so losses and bytes are within their limits."""
    printed = run_script(SCRIPT, "--json", *arguments, timeout_s=150).splitlines()
    rows = [json.loads(line) for line in printed if line.startswith("{")]
    return {row["case"]: row for row in rows if "case" in row}


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("engine", "limit"), [("ddp", 0.40), ("fsdp2", 0.45)])
def test_a_short_run_learns_with_two_fifths_of_the_bytes(engine: str, limit: float) -> None:
    rows = _rows(f"--engine={engine}", "--recipes=zeropp", "--steps=12", "--batch-size=2", "--tolerance=0.2")
    assert rows[f"{engine} zeropp"]["loss"] < 4.5  # the logarithm of 256 is 5.5
    assert rows[f"{engine} zeropp"]["ratio"] <= limit
