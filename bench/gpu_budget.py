"""The time limit that gpu_check.py sets for its steps; a script started without it has no limit."""

from __future__ import annotations

import os
import time

__all__ = ["LIMIT", "is_spent"]

LIMIT = "GPU_CHECK_LIMIT_S"
"""Environment variable: the seconds after which the step is killed."""
KEPT_SHARE = 0.2
"""The share of the limit kept for the case in progress and for the end; no new case starts in it."""
_STARTED_AT = time.monotonic()


def is_spent() -> bool:
    """Whether it is too late to start another case."""
    limit = os.environ.get(LIMIT)
    return limit is not None and time.monotonic() - _STARTED_AT > (1 - KEPT_SHARE) * float(limit)
