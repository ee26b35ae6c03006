"""Comparing two versions side by side: the confidence interval, and this version compared with itself."""

# covers zcomm/_bench/launch.py zcomm/_bench/options.py zcomm/_bench/data.py

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (9, (2, 8)), (15, (4, 12)), (20, (6, 15)), (30, (10, 21))])
def test_the_interval_has_the_ranks_of_the_published_table(
    count: int, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the sign test's 95 % interval, as in published tables."""
    monkeypatch.syspath_prepend(str(BENCH))
    import beside

    assert beside.interval(list(range(count, 0, -1))) == ranks


def test_a_version_beside_itself_has_the_same_losses() -> None:
    words = ["--before", sys.executable, "--rounds=1", "--steps=1", "--num-layers=1", "--hidden-size=64", "--same-bits"]
    command = [sys.executable, str(BENCH / "beside.py"), *words, "--json", "--systems", "zero stage 2", "--limit=1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [json.loads(line) for line in done.stdout.splitlines() if "system" in line]
    assert row["same_loss"] == "yes"
    assert row["before_ms"] > 0
