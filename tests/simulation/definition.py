"""A simulated job, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, replace


class Alone(Exception):  # noqa: N818
    """What a program raises on one rank."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong on one rank."""

    kind: str
    """
    at call ``at``:
        raises      the program raises before it
        late        it comes when the others are about to give it up
        differs     it makes another call than the others
        skips       it makes no call, and the others do
        extra       it makes a call, and the others do not
        closes      it closes the topology over which the others make it
        swaps       of two asynchronous calls it makes the second one first
    after ``at`` events of the job:
        dies        the process ends
        restarts    so does the whole job, and starts again over the same store
        interrupted somebody presses Ctrl+C
        stopped     it does nothing for some seconds
        full        it can create no more files
        file errors it can write to no file of its offloaded values
    after ``at`` events of the disk, or at the end:
        power       all ranks and the disk stop
    otherwise:
        slow        messages take seconds
        flips       a bit of message ``at`` changes on the way; ZCOMM_CHECK=1
    """
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
    """Of training: a key of MODES in training.py."""
    fault: Fault | None = None

    def with_fault(self, kind: str, rank: int, at: int) -> Scenario:
        return replace(self, fault=Fault(kind, rank, at))


@dataclass(frozen=True)
class Result:
    """How a scenario ended."""

    problem: str
    """The property that does not hold; empty: all do."""
    digest: int
    num_events: int
