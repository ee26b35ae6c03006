"""Something under way that can be waited for: an exchange, or what comes with it."""

from __future__ import annotations

import time
from typing import Any, Protocol

POLL_S = 0.0002


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Any:
        """Block until it has ended (NCCL: make the current stream wait)."""

    def is_completed(self) -> bool:
        """Whether it is known to have ended."""


def ends_within(pending: Pending, seconds: float) -> bool:
    """Whether ``pending`` is known to have ended after at most ``seconds``. Polls what has no ``ends_within()``."""
    own = getattr(pending, "ends_within", None)
    if own is not None:
        return bool(own(seconds))
    end = time.monotonic() + seconds
    while not pending.is_completed():
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True
