"""Exceptions of zcomm and zero. Each also derives from the built-in exception that a caller would expect."""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "CommunicationError",
    "ConfigError",
    "DamagedError",
    "DivergedError",
    "FormatError",
    "IntegrityError",
    "LayoutError",
    "MessageError",
    "StateError",
    "TopologyError",
    "ZcommError",
]


class ZcommError(Exception):
    """Base of every error that zcomm and zero raise on purpose."""


class LayoutError(ZcommError, ValueError):
    """A shape, size, dtype or device does not fit the layout that was asked for."""


class FormatError(ZcommError, ValueError):
    """An unknown wire format, or one that does not support the given tensor or option."""


class TopologyError(ZcommError, ValueError):
    """Ranks, nodes and process groups do not fit together."""


class ConfigError(ZcommError, ValueError):
    """An invalid setting."""


class BackendUnavailableError(ZcommError, RuntimeError):
    """A requested kernel or library cannot be used here."""


class StateError(ZcommError, RuntimeError):
    """The object is in a state that does not allow this call."""


class DivergedError(StateError):
    """The ranks diverged: they made different calls or have different settings, and would deadlock.

    Raised on every rank.
    """

    is_agreed_by_ranks = True


class CommunicationError(ZcommError, RuntimeError):
    """An exchange failed or timed out. The contents of its output are undefined."""


class MessageError(ZcommError, RuntimeError):
    """A received message has another layout than this rank expects, or was corrupted."""


class DamagedError(MessageError):
    """With ZCOMM_CHECK=1: a message was corrupted between two ranks. Raised on every rank of the collective."""


class IntegrityError(ZcommError, OSError):
    """A file does not hold what was written to it. Has the errno, filename and strerror of an OSError."""
