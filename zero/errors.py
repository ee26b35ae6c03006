"""Error classes of ZeRO beside zcomm's: NotAvailableError, CheckpointError and PublicationError."""

from __future__ import annotations

from zcomm import ConfigError
from zcomm.errors import ZcommError

__all__ = ["CheckpointError", "NotAvailableError", "PublicationError"]


class NotAvailableError(ConfigError, NotImplementedError):
    """A known configuration key asks for something that this version does not support."""


class CheckpointError(ZcommError, RuntimeError):
    """A checkpoint cannot be written, read, or used here. Names the file or tensor, and the remedy."""


class PublicationError(ZcommError, RuntimeError):
    """Weights cannot be published, or read by a subscriber. Names the folder or file, and the remedy."""
