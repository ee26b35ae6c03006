"""Error classes of ZeRO beside zcomm's: NotAvailableError and CheckpointError."""

from __future__ import annotations

from zcomm import ConfigError
from zcomm.errors import ZcommError

__all__ = ["CheckpointError", "NotAvailableError"]


class NotAvailableError(ConfigError, NotImplementedError):
    """A known configuration key asks for something that this version does not support."""


class CheckpointError(ZcommError, RuntimeError):
    """A checkpoint cannot be written, read, or used here. Names the file or tensor, and the remedy."""
