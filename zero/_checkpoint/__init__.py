"""Checkpoints: saved at any stage on any number of ranks, loaded at any other, without a pickle.

In:  a ZeroOptimizer and a folder; to load, also another stage or number of ranks.
Out: safetensors shards and metadata.json, written and fsynced before ``latest`` names them; or the loaded state.
Called by: users, through zero.save_checkpoint and zero.load_checkpoint, and by zero.engine.

Names are imported on first use, because ``torch.distributed.checkpoint`` and its imports take about 40 MiB of every
rank's memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zero.errors import CheckpointError

if TYPE_CHECKING:
    from zero._checkpoint.export import export_checkpoint
    from zero._checkpoint.load import LoadedCheckpoint, load_checkpoint
    from zero._checkpoint.model_file import save_model_file
    from zero._checkpoint.save import Saving, save_checkpoint

__all__ = [
    "CheckpointError",
    "LoadedCheckpoint",
    "Saving",
    "export_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_model_file",
]

MODULES = {
    "LoadedCheckpoint": "load",
    "Saving": "save",
    "export_checkpoint": "export",
    "load_checkpoint": "load",
    "save_checkpoint": "save",
    "save_model_file": "model_file",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
