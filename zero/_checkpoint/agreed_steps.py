"""Steps of a save or load that can fail on one rank alone: a user's object, a disk, memory. All raise, or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from zcomm import CommunicationError, Topology, control
from zero._config.rank_consistency import what_differs
from zero._ranks.rank_errors import is_agreed, raise_first
from zero.errors import CheckpointError

Result = TypeVar("Result")


def agreed(call: Callable[[], Result], ranks: Topology, trouble: str) -> Result:
    """What ``call``, which must not communicate, returns; if it raises on any of ``ranks``, all raise. Collective.

    Args:
        call: What is to be done.
        ranks: Who does it.
        trouble: What an error that is no CheckpointError means: the text that it gets before its own.

    Raises:
        CheckpointError: The first such rank's, with the same text on every rank.

    Cost: one small exchange.
    """
    results, error, handled = [], None, sys.exc_info()[1]
    try:
        results.append(call())
    except CheckpointError as caught:
        error = caught
    except Exception as caught:
        if isinstance(caught, CommunicationError) or is_agreed(caught, handled=handled):
            raise  # the other ranks have theirs
        error = CheckpointError(f"{trouble}: {caught!r}")
        error.__cause__ = caught
    raise_first(error, CheckpointError, ranks)
    return results[0]


def check_same_on_ranks(facts: Mapping[str, str], ranks: Topology, what: str, remedy: str) -> None:
    """Raise CheckpointError, the same on every rank, unless all have the same ``facts``. Collective."""
    if ranks.world_size > 1 and not control.are_equal(json.dumps(facts, sort_keys=True), ranks):
        found = "; ".join(what_differs(facts, ranks, lane="checkpoint"))
        raise CheckpointError(f"every rank must {what}: {found}; {remedy}")
