"""Exceptions of zcomm and zero. Each also derives from the built-in a caller would expect to catch."""

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
    """A wire format that does not exist, or does not take the tensor or option given."""


class TopologyError(ZcommError, ValueError):
    """Ranks, nodes and groups that do not fit together."""


class ConfigError(ZcommError, ValueError):
    """A setting that cannot be meant."""


class BackendUnavailableError(ZcommError, RuntimeError):
    """A kernel or library that was asked for cannot be used here."""


class StateError(ZcommError, RuntimeError):
    """A call that does not fit the state its object is in."""


class DivergedError(StateError):
    """The ranks do different things, and would wait for one another for ever. Raised on every rank."""

    is_agreed_by_ranks = True


class CommunicationError(ZcommError, RuntimeError):
    """An exchange that failed or has not ended in time; what it was to write is of no use."""


class MessageError(ZcommError, RuntimeError):
    """A message that is not what this rank was to receive, or that was damaged on the way."""


class DamagedError(MessageError):
    """With ZCOMM_CHECK=1: a message did not come as it was sent. Raised on every rank of the collective."""


class IntegrityError(ZcommError, OSError):
    """A file that does not hold what was written to it. errno, path and text as of any OSError."""
