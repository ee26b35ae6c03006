"""Checkpoints: saved at any stage on any number of ranks, loaded at any other, without a pickle."""

from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.export import export_checkpoint
from zero.checkpoints.load import Loaded, load_checkpoint
from zero.checkpoints.model_file import save_model_file
from zero.checkpoints.save import Saving, save_checkpoint

__all__ = [
    "CheckpointError",
    "Loaded",
    "Saving",
    "export_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_model_file",
]
