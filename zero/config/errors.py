"""What a configuration can be refused with, beside ConfigError."""

from __future__ import annotations

from zcomm import ConfigError

__all__ = ["NotAvailableError"]


class NotAvailableError(ConfigError, NotImplementedError):
    """A key that is understood and asks for what this version cannot do."""
