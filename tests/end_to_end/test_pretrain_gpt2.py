"""bench/pretrain_gpt2.py: the tutorial's flags and JSONs train alike at stages 1, 2 and 3."""

# covers bench/contenders/job.py bench/pretrain_gpt2.py

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks
from tests.zero.configs import CONFIGS

SCRIPT = str(ROOT / "bench" / "pretrain_gpt2.py")
TINY = [
    "--model-parallel-size=1", "--num-layers=2", "--hidden-size=64", "--num-attention-heads=2", "--batch-size=2",
    "--seq-length=32", "--train-iters=4", "--lr=1e-2", "--deepspeed",
]  # fmt: skip
FREE = {"stage3_param_persitance_threshold": 0}
OFFLOADED = CONFIGS["megatron_stage3_offload"]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "stage 1": (CONFIGS["megatron_stage1"], []),
    "stage 2, checkpoints": (CONFIGS["megatron_stage2"], ["--checkpoint-activations"]),
    "stage 3, host": (OFFLOADED, ["--zero-stage=3", "--remote-device=cpu"]),
    "stage 3, host, all sharded": (
        {"zero_optimization": OFFLOADED["zero_optimization"] | FREE},
        ["--zero-stage=3", "--checkpoint-activations", "--deepspeed-activation-checkpointing"],
    ),
}
"""The tutorial's three JSONs. Their threshold keeps every parameter of so small a model persistent, so stage 3 runs
once more with everything sharded.
"""


def _losses(printed: str) -> list[list[float]]:
    """The losses of each run, in order."""
    found: list[list[float]] = []
    for iteration, loss in re.findall(r"iteration +(\d+)/ +4 .*? lm loss: (\S+)", printed):
        found += [[]] if iteration == "1" else []
        found[-1].append(float(loss))
    return found


@pytest.mark.slow
def test_the_tutorials_flags_and_files(tmp_path: Path) -> None:
    runs = []
    for name, (config, flags) in CASES.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        runs.append([SCRIPT, *TINY, "--deepspeed_config", str(path), *flags])
    by_run = _losses(run_on_forks(2, runs, cwd=ROOT))
    assert [len(losses) for losses in by_run] == [4] * len(CASES)
    assert by_run[0][0] == pytest.approx(5.545, abs=0.5)  # log 256; a tied embedding makes repetitions likely at once
    assert by_run[0][3] < by_run[0][0] - 0.5
    assert by_run[1] == by_run[0]  # equal in every bit
    for losses in by_run[2:]:
        assert losses == pytest.approx(by_run[0], rel=1e-5)  # updated by CPUAdam, which rounds differently


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model-parallel-size=2", "--deepspeed_config=x"], "--model-parallel-size must be 1: got 2.*mpu="),
        (["--deepspeed"], "--deepspeed_config FILE is required"),
    ],
)
def test_what_it_does_not_do_is_named(flags: list[str], named: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert re.search(named, " ".join(done.stderr.split()))
