"""Lightning's Trainer under ZeroStrategy trains as it does under DDPStrategy."""

# covers zero/integrations/__init__.py zero/integrations/lightning.py

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

import zero

JOB = str(Path(__file__).parent / "lightning_job.py")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="needs lightning, of the extra front-ends"
    ),
]
ALL = ("fit", "resumed", "evaluated", "manual", "deferred")


def _run(num_ranks: int, *arguments: str) -> None:
    """0: Lightning starts two ranks."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DEVICES": str(num_ranks or 2)}
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone")
    command = [sys.executable, *(torchrun if num_ranks > 1 else ()), JOB, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every job wrote, by ``JOB-STAGE``."""
    folder = str(tmp_path_factory.mktemp("lightning"))
    stages = ("--", "1", "fit", "--", "2", "fit", "manual", "--", "3", *ALL, "half", "refused")
    _run(2, folder, "ddp", *ALL, "installed", *stages)
    _run(1, folder, "ddp", "resumed", "--", "1", "resumed")
    _run(0, folder, "2", "launched")
    return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


def _assert_same(found: Any, expected: Any) -> None:
    """Equal, numbers to a relative 1e-5."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert math.isclose(found, expected, rel_tol=1e-5), (found, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_weights_are_those_of_ddp(results: dict[str, Any], stage: int) -> None:
    """With accumulation, clipping, a schedule, and a parameter that the LightningModule itself uses."""
    expected = results["fit-ddp"]
    assert sum(expected["losses"][-6:]) < sum(expected["losses"][:6]) * 0.7
    _assert_same(results[f"fit-{stage}"], expected)


def test_a_resumed_training_gives_the_losses_of_one_that_did_not_stop(results: dict[str, Any]) -> None:
    whole, resumed = results["fit-3"]["losses"], results["resumed-3"]
    assert resumed["step"] == 12
    assert resumed["losses"] == whole[len(whole) // 2 :]


def test_another_stage_and_number_of_ranks_resumes_as_ddp_does(results: dict[str, Any]) -> None:
    assert len(results["resumed-1"]["losses"]) == 24
    _assert_same(results["resumed-1"], results["resumed-ddp"])


def test_a_module_is_evaluated_without_training_and_trained_after_it(results: dict[str, Any]) -> None:
    _assert_same(results["evaluated-3"], results["evaluated-ddp"])
    _assert_same(results["evaluated-3"]["tested"], results["fit-3"]["tested"])


@pytest.mark.parametrize("stage", [2, 3])
def test_manual_optimization(results: dict[str, Any], stage: int) -> None:
    _assert_same(results[f"manual-{stage}"], results["manual-ddp"])


def test_what_configure_model_builds_is_sharded_at_once(results: dict[str, Any]) -> None:
    _assert_same(results["deferred-3"]["losses"], results["deferred-ddp"]["losses"])
    assert results["deferred-3"]["was_sharded"]


def test_float16_with_a_loss_scale(results: dict[str, Any]) -> None:
    losses = results["half-3"]["losses"]
    assert results["half-3"]["scale"] == 2**8
    assert sum(losses[-6:]) < sum(losses[:6]) * 0.7
    assert all(
        math.isclose(a, b, rel_tol=0.03) for a, b in zip(losses[:4], results["manual-ddp"]["losses"], strict=False)
    )


def test_lightning_starts_the_ranks(results: dict[str, Any]) -> None:
    assert results["launched-2"]["ranks"] == 2
    _assert_same(results["launched-2"]["losses"], results["fit-ddp"]["losses"][:2])


def test_what_cannot_be_trained_is_a_named_error(results: dict[str, Any]) -> None:
    several, by_value, file = results["refused-3"]["errors"]
    assert several.startswith("ConfigError: ZeroStrategy needs one optimizer")
    assert "(SGD, SGD)" in several
    assert by_value.startswith("ConfigError: gradient_clip_algorithm")
    assert file.startswith("CheckpointError")
    assert "Regression.load_from_checkpoint(path)" in file


def test_install_ddp_as_a_callback(results: dict[str, Any]) -> None:
    assert results["installed-ddp"]["saved"] < 0.5
    assert not results["installed-ddp"]["is_installed"], "it is uninstalled at the end"
    assert results["installed-ddp"]["losses"][-1] < results["installed-ddp"]["losses"][0]


def test_names_are_imported_when_they_are_used() -> None:
    assert set(dir(zero.integrations)) >= {"InstallDDP", "ZeroStrategy"}
    assert not hasattr(zero.integrations, "no_such_name")
    script = (
        "import sys, zero, zero.integrations; assert 'lightning' not in sys.modules; zero.integrations.ZeroStrategy"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
