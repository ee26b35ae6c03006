"""The job under torchrun with restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.definition import TIMEOUT_S
from tests.faults.forked import RANKS, judge

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def run_elastic(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """One run: torchrun starts the ranks, and again after the fault."""
    (folder / "files").mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=2",
        "--monitor-interval=0.2", "-m", "tests.faults.job", str(folder),
    ]  # fmt: skip
    # torch.distributed.run keeps one store for all restarts, where new ranks would read what the dead ones wrote.
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started, is_over = time.monotonic(), True
    with (folder / "output").open("wb") as output:
        agent = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output,
                                 stderr=output, start_new_session=True)  # fmt: skip
        try:
            agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            is_over = False
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    saved = int((folder / "saved").read_text()) if (folder / "saved").exists() else 0
    found = judge(spec, folder, reference, saved) if is_over else {"outcome": "hang", "text": _tail(folder)}
    return {**spec, **found, "took_s": round(time.monotonic() - started, 2)}


def _tail(folder: Path) -> str:
    return (folder / "output").read_text()[-1500:]


def run_on_two_machines(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """Not built yet."""
    return {**spec, "outcome": "skipped", "took_s": TIMEOUT_S * 0}
