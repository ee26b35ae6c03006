"""The one error of checkpoints."""

from __future__ import annotations

from zcomm.errors import ZcommError

__all__ = ["CheckpointError"]


class CheckpointError(ZcommError, RuntimeError):
    """A checkpoint that cannot be written, read, or used here: names the file or tensor, and the remedy."""
