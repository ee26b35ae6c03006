"""How much memory saved checkpoints hold, and where."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActivationMemory", "Holding", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """Bytes of saved inputs of checkpointed functions on this rank."""

    device: int
    """In device memory now; with them what is saved as it is, which others may hold, too."""
    host: int
    files: int
    peak_device: int
    """The most at a time."""
    peak_host: int
    peak_files: int
    arena: int
    """Of the contiguous buffer, used or not."""
    num_allocations: int
    """Pieces of memory or files that were made for saved inputs so far."""


class Usage:
    """Counts what is held."""

    def __init__(self) -> None:
        self._now = {"device": 0, "host": 0, "files": 0}
        self._peak = dict(self._now)
        self.num_allocations = 0

    def hold(self, place: str, nbytes: int) -> Holding:
        """Count ``nbytes`` until what is returned is dropped."""
        self._now[place] += nbytes
        self._peak[place] = max(self._peak[place], self._now[place])
        return Holding(self, place, nbytes)

    def give(self, place: str, nbytes: int) -> None:
        """They are free."""
        self._now[place] -= nbytes

    def report(self, arena_nbytes: int, num_allocations: int) -> ActivationMemory:
        """The counts, with those of an arena."""
        return ActivationMemory(
            **self._now,
            **{f"peak_{place}": nbytes for place, nbytes in self._peak.items()},
            arena=arena_nbytes,
            num_allocations=self.num_allocations + num_allocations,
        )


class Holding:
    """Bytes that are held as long as this object is."""

    __slots__ = ("_nbytes", "_place", "_usage")

    def __init__(self, usage: Usage, place: str, nbytes: int) -> None:
        self._usage, self._place, self._nbytes = usage, place, nbytes

    def __del__(self) -> None:
        self._usage.give(self._place, self._nbytes)
