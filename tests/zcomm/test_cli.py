"""``zcomm env``, the report for bug reports: complete, machine readable, and it never fails."""

# covers zcomm/_stateful/encoded_shard.py zcomm/cli.py zcomm/report.py

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from zcomm import cli, report
from zcomm._base import env
from zcomm._kernels import native_calls


def test_table_names_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    for expected in ("zcomm-zero", torch.__version__, "native (", "gloo", "NCCL", "127.0.0.1", *env.VARIABLES):
        assert expected in text


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.collect()


def test_environment_of_torchrun_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    assert report.collect()["environment"]["LOCAL_WORLD_SIZE"] == "7"


def test_missing_native_kernels_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls, "UNBUILT_REASON", "the native module is not built")
    assert "not built" in report.collect()["kernels"]["CPU tensors"]


def test_another_torch_is_marked_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.40.0")
    assert "outside the tested range 2.11 to 2.13" in report.collect()["versions"]["torch"]


def test_command_needs_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err


def test_a_wrong_setting_is_reported_not_raised() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zcomm", "env"],
        env=os.environ | {"ZCOMM_KERNELS": "fast"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ZCOMM_KERNELS must be one of auto, native, triton, cuda, reference" in done.stdout
