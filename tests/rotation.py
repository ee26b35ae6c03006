"""Runs some of many slow cases each day, in turn. ``ZERO_TEST_DAY=NUMBER`` selects the day with that ordinal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TypeVar

__all__ = ["DAY", "of_the_day"]

DAY = int(os.environ.get("ZERO_TEST_DAY", datetime.now(timezone.utc).date().toordinal()))
Case = TypeVar("Case")


def of_the_day(cases: Sequence[Case], count: int) -> list[Case]:
    """Select ``count`` of ``cases``; every case runs once within ``len(cases) / count`` days."""
    return [cases[(DAY * count + i) % len(cases)] for i in range(count)]
