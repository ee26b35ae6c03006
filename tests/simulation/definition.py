"""A simulated job, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank."""

    kind: str
    """"raises": the program raises before call ``at``; "dies": the process ends after ``at`` events of the job;
    "differs": it makes another call than the others in place of call ``at``, and goes on; "late": it comes to call
    ``at`` when the others are about to give it up; "power": all ranks and the disk stop after ``at`` events;
    "full": after ``at`` events the rank can create no more files."""
    rank: int
    at: int


@dataclass(frozen=True)
class Scenario:
    """A job."""

    level: str
    seed: int
    """Decides the order of events."""
    world_size: int
    ranks_per_node: int
    calls: tuple[str, ...]
    """What every rank calls, in this order; of checkpoints: the tags of the saves."""
    mode: str = ""
    """Of training: a key of MODES in scenarios.py."""
    fault: Fault | None = None


@dataclass(frozen=True)
class Result:
    """How a scenario ended."""

    problem: str
    """The property that does not hold; empty: all do."""
    digest: int
    num_events: int
