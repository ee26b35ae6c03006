"""What a configuration can be refused with, beside ConfigError."""

from __future__ import annotations

from zcomm import ConfigError
from zcomm.errors import ZcommError

__all__ = ["CheckpointError", "NotAvailableError"]


class NotAvailableError(ConfigError, NotImplementedError):
    """A key that is understood and asks for what this version cannot do."""


class CheckpointError(ZcommError, RuntimeError):
    """A checkpoint that cannot be written, read, or used here: names the file or tensor, and the remedy."""
