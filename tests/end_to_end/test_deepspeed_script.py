"""The training script of DeepSpeed's tutorials runs with one import changed, under the tutorials' configurations."""

# covers bench/contenders/job.py bench/side_by_side/configurations.py

from __future__ import annotations

import json
import math
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks
from tests.ranks import run_ranks
from tests.zero.configs import CONFIGS, NEEDS_MORE

pytest.importorskip("transformers", reason="transformers is not installed: it is in the bench extra")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
SCRIPT = str(ROOT / "tests" / "end_to_end" / "deepspeed_script.py")
PLACES = {
    "megatron_stage3_offload": ("device", "cpu"),  # all parameters are below the persistence threshold
    "zero_offload": ("cpu", "cpu"),
    "zero_infinity": ("nvme", "nvme"),
    "zero_infinity_in_memory": ("cpu", "nvme"),
}
"""Where parameters and states are stored; for all other configurations: on the device."""
SECTION = CONFIGS["zero_infinity"]["zero_optimization"]
IN_MEMORY = SECTION | {"offload_param": SECTION["offload_param"] | {"max_in_cpu": 1_000_000_000}}
CONFIGURED = CONFIGS | {"zero_infinity_in_memory": CONFIGS["zero_infinity"] | {"zero_optimization": IN_MEMORY}}


def _arguments(name: str, folder: Path) -> list[str]:
    """Write the configuration ``name``; return the script's arguments to run under it."""
    steps = 30 if "fp16" in CONFIGURED[name] else 9  # steps until the loss scale has fallen from 2^32
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGURED[name]).replace("/local_nvme", str(folder)))  # the only change to the script
    return [f"--deepspeed_config={path}", f"--output={folder / name}", f"--steps={steps}"]


def _reports(name: str, folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]


def _warmup_decay(steps: int) -> float:
    """The learning rate after so many steps of the schedule, which warms up to 3e-5 in 30 of 300 steps."""
    return 3e-5 * math.log(max(steps, 1)) / math.log(30) if steps <= 30 else 3e-5 * (300 - (steps - 1)) / 270


def _check_fp16(report: dict[str, Any]) -> None:
    """Overflows halve the scale of 2^32, except the first (hysteresis 2); none of them advances the schedule."""
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


def _check_tiers(report: dict[str, Any], rank: int, places: tuple[str, str], folder: Path) -> None:
    """Check where parameters and states are stored, which files there are, and the bytes moved."""
    counts, shards, num_steps = report["moved"], report["shards"], len(report["rows"])
    in_parameters, in_states = places
    own_numel, num_applied = report["numel"] // 2, num_steps - report["skipped"]
    itemsize = 2 if report["skipped"] else 4
    text = {"nvme": f"parameters are stored in files below {folder};", "cpu": "parameters are stored in host memory;"}
    if in_states != "device":
        assert text.get(in_parameters, "parameters are stored on the device, as they stay full;") in report["effective"]
        assert "zero's CPUAdam in place of the torch.optim.Adam that was given" in report["effective"]
    assert shards[in_parameters] == sum(shards.values()) >= own_numel * itemsize
    assert ("gradients to_host" in counts) == (in_states != "device")
    if in_states != "device":
        # Shards are padded, and in files they fill whole pages.
        assert own_numel * itemsize <= counts["gradients to_host"] / num_steps <= sum(shards.values())
        assert counts["parameters to_device"] >= num_steps * own_numel * itemsize
    found = {Path(name).parent.name.split("-", 2)[2] for name in report["files"] if name.startswith(f"{folder}/zero-")}
    for kind, place, nbytes in (("parameters", in_parameters, itemsize), ("states", in_states, 12)):
        assert (f"{kind} read" in counts) == (f"{kind} write" in counts) == (place == "nvme")
        if place == "nvme":
            assert f"{kind}-rank{rank}" in found
            assert counts[f"{kind} write"] >= num_applied * own_numel * nbytes
            assert counts[f"{kind} read"] >= (num_applied - 1) * own_numel * nbytes


def test_script_runs_unchanged_on_two_ranks(tmp_path: Path) -> None:
    names = [name for name in CONFIGURED if name not in NEEDS_MORE]
    printed = run_on_forks(2, [[SCRIPT, *_arguments(name, tmp_path)] for name in names], cwd=ROOT)
    assert printed.count("step:0, loss:") == len(names)
    divides = [name for name in names if "activation_checkpointing" in CONFIGURED[name]]
    assert "zero_r" in divides
    assert printed.count("inactive: partition_activations") == len(divides)  # logged once by each script
    for name in names:
        reports = _reports(name, tmp_path, 2)
        _check(reports, CONFIGURED[name])
        for rank, report in enumerate(reports):
            _check_tiers(report, rank, PLACES.get(name, ("device", "device")), tmp_path)


def _run_as_on_two_nodes(rank: int, arguments: list[str]) -> None:
    """Run on a live rank in the environment that torchrun sets for 2 nodes of 2 ranks."""
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [SCRIPT, *arguments])
        end = runpy.run_path(SCRIPT, run_name="__main__")
        end["engine"].destroy()


def test_zeropp_on_two_nodes(tmp_path: Path) -> None:
    run_ranks(4, _run_as_on_two_nodes, _arguments("zeropp", tmp_path))
    reports = _reports("zeropp", tmp_path, 4)
    _check(reports, CONFIGS["zeropp"])
    assert (
        "2 x 2 ranks: weights as int8, gradients as int4 -> int4, secondary partition (hpZ) on"
        in reports[0]["effective"]
    )
