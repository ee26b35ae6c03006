"""The protocol of operations in flight: anything with ``wait()`` and ``is_completed()``, such as an exchange."""

from __future__ import annotations

from typing import Any, Protocol

from zcomm._base.rank_context import clock

POLL_S = 0.0002
"""How often :func:`ends_within` asks a Work of torch.distributed, which cannot be waited for with a timeout."""


class Pending(Protocol):
    """An operation in flight."""

    def wait(self) -> Any:
        """Block the host until it is complete; over NCCL, make the current stream wait and return at once."""

    def is_completed(self) -> bool:
        """Whether it is complete, with a result or an error. Never blocks."""


def ends_within(pending: Pending, seconds: float) -> bool:
    """Wait until ``pending`` is complete, ``seconds`` at most; whether it is. Polls what has no ``ends_within()``."""
    own = getattr(pending, "ends_within", None)
    if own is not None:
        return bool(own(seconds))
    end = clock().monotonic() + seconds
    while not pending.is_completed():
        if clock().monotonic() >= end:
            return False
        clock().sleep(POLL_S)
    return True
