"""The time budget of a step of gpu_check.py; without gpu_check.py there is no limit."""

from __future__ import annotations

import os
import time

__all__ = ["LIMIT", "is_spent"]

LIMIT = "GPU_CHECK_LIMIT_S"
"""The environment variable with the seconds after which the step is killed."""
KEPT_SHARE = 0.2
"""Of that, for what is under way when no other case is begun any more, and for the end."""
_BEGUN_AT = time.monotonic()


def is_spent() -> bool:
    """Whether no other case should be begun."""
    limit = os.environ.get(LIMIT)
    return limit is not None and time.monotonic() - _BEGUN_AT > (1 - KEPT_SHARE) * float(limit)
