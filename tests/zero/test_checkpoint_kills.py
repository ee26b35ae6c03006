"""A kill at any moment of an asynchronous save leaves the last complete checkpoint, and it loads."""

# covers zero/_checkpoint/json_tree.py zero/_checkpoint/request.py zero/_checkpoint/save.py

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zero
from tests.zero.models import new_model

ROOT = Path(__file__).parents[2]
NUM_KILLS = int(os.environ.get("ZERO_TEST_KILLS", "5"))


@pytest.mark.timeout(240 + 24 * NUM_KILLS)
def test_kills_during_saves_leave_the_last_complete_checkpoint(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    command = [sys.executable, "-m", "tests.zero.kill_during_saves", str(tmp_path), str(NUM_KILLS), str(seed)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=220 + 24 * NUM_KILLS, capture_output=True)
    model = new_model(seed=1)
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=2)
    for trial in range(NUM_KILLS):
        folder = tmp_path / str(trial)
        path, state = zero.load_checkpoint(optimizer, folder)
        assert path is not None, f"seed {seed}"
        values = torch.cat([param.detach().flatten() for param in model.parameters()])
        assert values.unique().tolist() == [state["step"]], f"seed {seed}"
        assert state["step"] >= int((folder / "complete-0").read_text()), f"seed {seed}"
        assert path.name == ("again" if trial % 2 else f"step{state['step']}")
        zero.save_checkpoint(optimizer, folder, path.name)
        assert len(list(path.iterdir())) == 2, "what was left of a killed save is gone"
    optimizer.close()
