"""Checkpoints: saved at any stage on any number of ranks, loaded at any other, without a pickle."""

from zero.checkpoint.errors import CheckpointError
from zero.checkpoint.export import export_checkpoint
from zero.checkpoint.load import Loaded, load_checkpoint
from zero.checkpoint.model_file import save_model_file
from zero.checkpoint.save import Saving, save_checkpoint

__all__ = [
    "CheckpointError",
    "Loaded",
    "Saving",
    "export_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "save_model_file",
]
