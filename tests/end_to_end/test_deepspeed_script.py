"""The training script of DeepSpeed's tutorials runs with one import changed, under their configurations."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from tests.zero.configs import CONFIGS, NEEDS_MORE

pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SCRIPT = ROOT / "tests" / "end_to_end" / "deepspeed_script.py"
STEPS = 30


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _run(config: dict[str, Any], folder: Path, *, num_nodes: int = 1) -> list[dict[str, Any]]:
    """The script on 2 ranks of each node; what every rank wrote."""
    path, output = folder / "config.json", folder / "report"
    path.write_text(json.dumps(config))
    where = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}", f"--nnodes={num_nodes}", "--nproc-per-node=2"]
    script = [str(SCRIPT), f"--deepspeed_config={path}", f"--output={output}", f"--steps={STEPS}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *where, f"--node-rank={node}", *script],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(num_nodes)
    ]  # fmt: skip
    texts = [agent.communicate(timeout=160)[0] for agent in agents]
    assert all(agent.returncode == 0 for agent in agents), "\n".join(text[-4000:] for text in texts)
    assert "step:0, loss:" in texts[0]
    return [json.loads(Path(f"{output}-{rank}.json").read_text()) for rank in range(2 * num_nodes)]


def _warmup_decay(steps: int) -> float:
    """The schedule of the configurations after so many steps of it: to 3e-5 in 30 of 300 steps."""
    return 3e-5 * math.log(max(steps, 1)) / math.log(30) if steps <= 30 else 3e-5 * (300 - (steps - 1)) / 270


def _check_fp16(report: dict[str, Any]) -> None:
    """From scale 2^32: overflows halve it, but for the first (hysteresis 2); none of them moves the schedule."""
    rows, power, num_overflows, num_applied = report["rows"], 32, 0, 0
    for row in rows:
        assert row["scale"] == 2.0**power
        num_overflows += not row["applied"]
        num_applied += row["applied"]
        power = 32 - max(num_overflows - 1, 0)
        assert row["lr"] == pytest.approx(_warmup_decay(num_applied), abs=1e-12)
    assert report["skipped"] == num_overflows
    assert num_overflows > 1
    assert num_applied > 3
    assert not rows[0]["applied"]
    assert rows[-1]["applied"]


def _check(reports: list[dict[str, Any]], config: dict[str, Any]) -> None:
    for report in reports:
        assert f"ZeRO stage {config['zero_optimization']['stage']}" in report["effective"]
        losses = [row["loss"] for row in report["rows"]]
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[0] == pytest.approx(math.log(256), abs=0.3)
        assert min(losses) < losses[0]
        assert [row["scale"] for row in report["rows"]] == [row["scale"] for row in reports[0]["rows"]]
        if "fp16" in config:
            _check_fp16(report)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in NEEDS_MORE])
def test_script_runs_unchanged_on_two_ranks(name: str, tmp_path: Path) -> None:
    _check(_run(CONFIGS[name], tmp_path), CONFIGS[name])


def test_zeropp_on_two_nodes(tmp_path: Path) -> None:
    reports = _run(CONFIGS["zeropp"], tmp_path, num_nodes=2)
    _check(reports, CONFIGS["zeropp"])
    assert (
        "2 x 2 ranks: weights as int8, gradients as int4 -> int4, secondary partition (hpZ) on"
        in reports[0]["effective"]
    )
