"""The main job at test size: its command line, how to run it, and how to read its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "bench" / "train_gpt.py")
TINY = [
    "--num-layers=2", "--hidden-size=64", "--num-attention-heads=2", "--seq-length=32", "--batch-size=8",
    "--train-iters=6", "--eval-interval=3", "--sample-bytes=8", "--max-bytes=200000",
]  # fmt: skip


def run_script(script: str, *arguments: str, timeout_s: int = 100) -> str:
    """Run a script of bench/ to its end and return its output."""
    done = subprocess.run(
        [sys.executable, script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Warning" not in done.stderr, done.stderr[-4000:]
    return done.stdout


def metrics(output: Path) -> list[dict[str, Any]]:
    """Parse the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path, run: str) -> list[tuple[str, int, float]]:
    """All training and held-out losses of ``run``, in order, at full precision."""
    rows = (row for row in metrics(output) if row["kind"] != "summary" and row["run"] == run)
    return [(row["kind"], row["step"], row["loss"]) for row in rows]


def summary(output: Path, run: str) -> dict[str, Any]:
    """The column of ``run`` in the table that the job prints."""
    return next(row for row in metrics(output) if row["kind"] == "summary" and row["run"] == run)
