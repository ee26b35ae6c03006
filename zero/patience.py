"""Waiting for other ranks' part of an exchange, without waiting for ever where they wait for this rank.

A rank that has no gradient for a parameter reduces its bucket only at the end of backward. Until then it needs what the
other ranks gather (stage 3), and there it waits for all of them: they must not stop for that reduction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from zcomm import Work

__all__ = ["Patience"]

logger = logging.getLogger("zero")

PATIENCE_S = 10.0
"""And ten times the longest wait so far: a slow network is no reason to go on."""


class Patience:
    """Of one rank."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._is_lost = False

    def lasts(self, works: Sequence[Work]) -> bool:
        """Whether ``works`` end before it is lost. Once it is, nothing is waited for any more."""
        started = time.perf_counter()
        limit_s = 0.0 if self._is_lost else max(PATIENCE_S, 10 * self._longest_s)
        for work in works:
            if not work.completes_within(max(started + limit_s - time.perf_counter(), 0.0)):
                self._lose(limit_s)
                return False
        self._longest_s = max(self._longest_s, time.perf_counter() - started)
        return True

    def _lose(self, after_s: float) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "no reduction has ended for %.0f s, as if another rank has no gradient for some parameter in this "
                "step: from here on this rank keeps the full gradients of as many layers as it takes",
                after_s,
            )
