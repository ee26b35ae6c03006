"""``bench/compiled.py`` prints a row for each stage: compiled blocks beside eager ones."""

# covers zcomm/_bench/harness.py

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "compiled.py"
SMALL = ["--num-layers", "1", "--hidden-size", "32", "--batch-size", "1", "--seq-length", "16", "--rounds", "3"]


def test_compiled_blocks_have_the_losses_of_eager_ones_at_each_stage() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--backend", "aot_eager", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = [row for line in done.stdout.splitlines() if "stage" in (row := json.loads(line))]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["breaks"] == row["num_wrong"] == 0
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
