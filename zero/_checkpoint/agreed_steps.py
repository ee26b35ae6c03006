"""Steps of a save or load that may fail on one rank alone (a user's object, a disk, memory): all ranks raise, or none.

A rank that raised alone would leave the others in their next collective: a deadlock until the group's timeout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from zcomm import CommunicationError, Topology, control
from zero._config.rank_consistency import differences_between_ranks
from zero._ranks.rank_errors import is_agreed, raise_first
from zero.errors import CheckpointError

Result = TypeVar("Result")


def agreed(call: Callable[[], Result], ranks: Topology, trouble: str) -> Result:
    """Return ``call()``; if it raises on any of ``ranks``, all of them raise. Collective.

    Args:
        call: The step. It must not communicate: the other ranks would wait for one that has raised.
        ranks: The ranks that take this step.
        trouble: Text in front of an error that is no CheckpointError.

    Raises:
        CheckpointError: That of the first rank that failed, with the same text on every rank.

    Cost: one small exchange.
    """
    results, error, handled = [], None, sys.exc_info()[1]
    try:
        results.append(call())
    except CheckpointError as caught:
        error = caught
    except Exception as caught:
        if isinstance(caught, CommunicationError) or is_agreed(caught, handled=handled):
            raise  # the other ranks raise, too, and skip the exchange below
        error = CheckpointError(f"{trouble}: {caught!r}")
        error.__cause__ = caught
    raise_first(error, CheckpointError, ranks)
    return results[0]


def check_same_on_ranks(facts: Mapping[str, str], ranks: Topology, what: str, remedy: str) -> None:
    """Raise CheckpointError, the same on every rank, unless ``facts`` are equal on all ranks. Collective."""
    if ranks.world_size > 1 and not control.are_equal(json.dumps(facts, sort_keys=True), ranks):
        found = "; ".join(differences_between_ranks(facts, ranks, lane="checkpoint"))
        raise CheckpointError(f"every rank must {what}: {found}; {remedy}")
