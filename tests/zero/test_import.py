"""``import zero`` loads no heavy modules."""

# covers zero/optimizer.py

from __future__ import annotations

import subprocess
import sys

import zcomm
import zero

HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "triton",
)
SCRIPT = f"""
import sys
import torch, torch.distributed
before = set(sys.modules)
import zero
heavy = sorted(name for name in set(sys.modules) - before if name.startswith({HEAVY!r}))
assert not heavy, heavy
assert not any(name.startswith("zcomm.install") for name in sys.modules)
import zcomm
assert callable(zcomm.install_ddp) and "zcomm.install.fsdp2" in sys.modules
from zero import load_checkpoint
assert "torch.distributed.checkpoint" in sys.modules
assert load_checkpoint is zero.load_checkpoint
"""


def test_what_few_need_is_imported_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_others_are_not() -> None:
    for module in (zcomm, zero, zero.checkpoints):
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
        assert not hasattr(module, "no_such_name")
    assert not hasattr(zero, "save_model_file")
