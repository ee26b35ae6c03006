"""The benchmark of publishing runs, and finds every bit and every receiver."""

# covers zero/_publish/publisher.py

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--numels 1 --link-numels 1 --warmup 2 --steps 2 --updates 5 --kills 2"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rehearsal_of_the_benchmark(tmp_path: Path) -> None:
    page = tmp_path / "publish.md"
    command = [sys.executable, "bench/publish.py", *SMALL.split(), "--output", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines() if "| 0.87 |" in line
    ]
    assert [row[1] for row in rows] == ["0.0001", "1e-05", "1e-06"]
    ratios = [float(row[6]) for row in rows]
    assert ratios == sorted(ratios), "smaller changes take fewer bytes"
    assert all(float(row[6]) > float(row[7]) and float(row[8]) > 1 for row in rows)
    found = re.search(r"(\d+) of (\d+) updates.* (\d+) of (\d+) receivers", page.read_text())
    assert found is not None
    assert found.groups() == ("5", "5", "2", "2")
