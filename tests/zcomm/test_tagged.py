"""Exchanges that fail: whoever asks whether they have ended learns it at once, and the error when waiting."""

from __future__ import annotations

import time

import pytest

from zcomm.tagged import Exchange


class _Lost:
    """A receive from a rank that is gone."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_an_exchange_that_failed_has_ended() -> None:
    """Else a rank that only asks, as one that has many reductions under way, goes on asking for its patience."""
    pending = Exchange([_Lost()])
    end = time.monotonic() + 30
    while not pending.is_completed():
        assert time.monotonic() < end
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            pending.wait()
