"""transformers' Trainer, accelerate, peft and TRL through the door train as they do without DeepSpeed."""

# covers zero/compat/engine.py zero/compat/comm.py

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOBS = str(Path(__file__).parent / "jobs.py")
ROOT = Path(__file__).parents[2]
NEEDED = ("transformers", "accelerate", "peft")
HAS_TRL = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]


def _python(*arguments: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every job wrote, by ``JOB-STAGE``."""
    folder = str(tmp_path_factory.mktemp("front_ends"))
    both = ("trainer", "accelerate", "pretrained")
    _python(JOBS, folder, "2", "plain", *both)
    groups = ("2", "2", *both, "--", "2", "3", *both, "resumed", "from_json", "--", "3", "1", "resumed")
    _python("-m", "zero.compat", JOBS, folder, *groups)
    return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def _assert_close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert math.isclose(one, other, rel_tol=1e-5), (found, expected)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_fifty_losses_of_the_trainer_are_those_without_deepspeed(results: dict[str, Any], stage: str) -> None:
    plain, through = results["trainer-plain"], results[f"trainer-{stage}"]
    assert len(plain["losses"]) == 50
    assert plain["losses"][-1] < plain["losses"][0] - 0.5
    for name in ("losses", "norms", "evaluated"):
        _assert_close(through[name], plain[name])


def test_a_resumed_trainer_gives_the_losses_of_one_that_did_not_stop(results: dict[str, Any]) -> None:
    assert results["resumed-3"]["losses"] == results["trainer-3"]["losses"]
    assert results["resumed-3"]["evaluated"] == results["trainer-3"]["evaluated"][:1]


def test_a_trainer_resumes_at_another_stage_on_another_number_of_ranks(results: dict[str, Any]) -> None:
    _assert_close(results["resumed-1"]["evaluated"], results["trainer-3"]["evaluated"][:1])
    assert results["resumed-1"]["losses"][-1] < results["trainer-3"]["losses"][24]


def test_the_trainer_fills_in_a_json_file_with_its_own_optimizer_and_schedule(results: dict[str, Any]) -> None:
    """DeepSpeed's WarmupDecayLR: a logarithmic warm-up over 5 steps, then linear decay to the 10th."""
    warmup = [1e-3 * math.log(step + 1) / math.log(5) for step in range(5)]
    decay = [1e-3 * (10 - step) / (10 - 5) for step in range(5, 10)]
    _assert_close(results["from_json-3"]["rates"][1:], [*warmup, *decay][1:])
    assert results["from_json-3"]["losses"][-1] < results["from_json-3"]["losses"][0]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_pretrained_model_trains_and_generates(results: dict[str, Any], stage: str) -> None:
    plain, through = results["pretrained-plain"], results[f"pretrained-{stage}"]
    _assert_close(through["losses"], plain["losses"])
    assert through["tokens"] == plain["tokens"]
    assert through["is_sharded"] == (stage == "3")


def _assert_same_training(through: dict[str, Any], plain: dict[str, Any]) -> None:
    assert through["ranks"] == ["DistributedType.DEEPSPEED", 2]
    for name in ("losses", "again", "rate"):
        _assert_close(through[name], plain[name])
    assert through["again"] == through["losses"][-len(through["again"]) :], "the loaded state is the saved one"
    _assert_close(list(through["weights"].values()), list(plain["weights"].values()))


@pytest.mark.parametrize("stage", ["2", "3"])
def test_accelerate_trains_saves_and_loads(results: dict[str, Any], stage: str) -> None:
    _assert_same_training(results[f"accelerate-{stage}"], results["accelerate-plain"])


LAUNCH_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {gradient_accumulation_steps: 2, gradient_clipping: 0.5, offload_optimizer_device: none,
  offload_param_device: none, zero3_init_flag: false, zero_stage: 3, zero3_save_16bit_model: true}
machine_rank: 0
num_machines: 1
num_processes: 2
main_process_port: 0
mixed_precision: 'no'
use_cpu: false
"""


def test_accelerate_launch_with_its_own_file(results: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds.yaml").write_text(LAUNCH_FILE)
    launcher = ("-m", "zero.compat", "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "ds.yaml"))
    _python(*launcher, "-m", "zero.compat", JOBS, str(tmp_path), "2", "launched", "accelerate")
    launched = json.loads((tmp_path / "accelerate-launched.json").read_text())
    _assert_same_training(launched, results["accelerate-plain"])


@pytest.mark.skipif(not HAS_TRL, reason="needs trl and datasets, of the extra front-ends")
def test_trl_trains_a_lora_adapter(tmp_path: Path) -> None:
    _python(JOBS, str(tmp_path), "2", "plain", "sft")
    _python("-m", "zero.compat", JOBS, str(tmp_path), "2", "2", "sft", "--", "2", "3", "sft")
    plain, *through = (json.loads((tmp_path / f"sft-{of}.json").read_text()) for of in ("plain", "2", "3"))
    assert plain["losses"][-1] < plain["losses"][0]
    for one in through:
        _assert_close(one["losses"], plain["losses"])
