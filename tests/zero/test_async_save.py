"""An asynchronous save: training waits for the copy alone, and the checkpoint has the values of that time."""

# covers zero/_checkpoint/dcp.py

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.test_checkpoint import assert_equal_bits, whole_state
from tests.zero.training import train, zero_optimizer
from zero._checkpoint.dcp import FolderWriter


def _check_goes_on(rank: int, folder: str, stage: int, raw: dict[str, Any]) -> None:
    gate, has_begun = threading.Event(), threading.Event()
    write = FolderWriter.write_data

    def blocked(self: FolderWriter, *args: Any) -> Any:
        has_begun.set()
        assert gate.wait(30)
        return write(self, *args)

    FolderWriter.write_data = blocked  # type: ignore[method-assign]
    try:
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, stage=stage, **raw) as optimizer:
            train(model, optimizer, rank, steps=2)
            expected = whole_state(optimizer, model)
            saving = zero.save_checkpoint(optimizer, folder, "blocked", async_op=True)
            train(model, optimizer, rank, steps=3)  # overwrite every buffer that the save could share
            assert has_begun.wait(30)
            assert not saving.is_done
            assert not (Path(folder) / "latest").exists()
            moved = whole_state(optimizer, model)
            assert not any(torch.equal(moved[name], expected[name]) for name in moved)
            gate.set()
            saving.wait()
            assert zero.load_checkpoint(optimizer, folder).path == Path(folder) / "blocked"
            assert_equal_bits(whole_state(optimizer, model), expected)
    finally:
        gate.set()
        FolderWriter.write_data = write  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("stage", "raw"),
    [(0, {}), (1, {}), (2, {"offload_optimizer": {"device": "cpu"}}), (3, {})],
    ids=["0", "1", "2, offloaded", "3"],
)
def test_training_goes_on_while_a_save_is_blocked(tmp_path: Path, stage: int, raw: dict[str, Any]) -> None:
    run_ranks(2, _check_goes_on, str(tmp_path), stage, raw)
