"""When to gather what: from the recorded order of an iteration to a plan of prefetching and keeping. Pure arithmetic.

An iteration is one optimizer step (all its micro-batches, forward and backward), or one forward without gradients. A
*use* of a bucket begins when somebody needs its full parameters and ends when nobody does any more:

    use         0          1          2          3 ...                    position: uses begun so far
    bucket      wte        block 0    block 1    block 1 (backward)
    plan        start 1    start 2    keep, no gather for 3

Invariants:
    S1  A plan depends on the order of uses, where each ended, sizes and limits: all equal on every rank. Never on time.
    S2  At every position, what is prefetched and not in use yet has at most ``prefetch_numel`` elements; nothing is
        prefetched or kept that lets live elements exceed ``live_numel``. Uses alone may exceed it.
    S3  Gathers start in the order of the uses they are for, each after the previous use of its bucket has ended.
    S4  An order that changes costs the rest of that iteration its prefetches, never a wrong result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

END_OF_BACKWARD = -1
"""In the place of a bucket: a mark in the order, without elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All in elements."""

    prefetch_numel: int
    """Gathered ahead of their use at most; 0: nothing."""
    live_numel: int
    """Gathered at a time at most, but for what is in use."""
    reuse_numel: int
    """A bucket is kept if fewer are used before it is used again; 0: never."""


class Use(NamedTuple):
    """One use of a bucket; its index in the order is where it begins."""

    bucket: int
    end: int
    """How many uses had begun when it ended."""


class GatherStart(NamedTuple):
    """Start the exchanges of ``bucket`` up to, not including, number ``stop``."""

    bucket: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What to do at each position of a recorded order."""

    uses: tuple[Use, ...]
    starts: tuple[tuple[GatherStart, ...], ...]
    """What to prefetch when a use begins, after its own gather has started."""
    keeps: tuple[bool, ...]
    """Whether the bucket stays full from the end of a use to its next."""
    gathers: tuple[int, ...]
    """Positions of the uses that begin with a gather."""
    needed_numel: int
    """The most elements that are in use at a time."""


def make_plan(uses: Sequence[Use], exchanges: Sequence[Sequence[int]], limits: Limits) -> PrefetchPlan:
    """Plan an iteration.

    Args:
        uses: The order to expect. Uses of one bucket do not overlap.
        exchanges: Of each bucket, the elements that each exchange of its gather carries, in order.
        limits: What may be held.
    """
    return _Planner(uses, exchanges, limits).plan()


class _Planner:
    def __init__(self, uses: Sequence[Use], exchanges: Sequence[Sequence[int]], limits: Limits) -> None:
        self.uses, self.exchanges, self.limits = uses, exchanges, limits
        self.numel = [0 if use.bucket < 0 else sum(exchanges[use.bucket]) for use in uses]
        """Elements of each use's bucket."""
        self.live = [0] * len(uses)
        """Elements that are full, or being gathered, from each position to the next."""
        self.ahead = [0] * len(uses)
        """Of these, what is prefetched for later."""
        for position, use in enumerate(uses):
            self._hold(position, use.end, self.numel[position])
        self.needed_numel = max(self.live, default=0)
        self.next: list[int | None] = [None] * len(uses)
        last: dict[int, int] = {}
        for position, use in enumerate(uses):
            if use.bucket in last:
                self.next[last[use.bucket]] = position
            last[use.bucket] = position
        self.keeps = [False] * len(uses)
        self.starts: list[list[GatherStart]] = [[] for _ in uses]
        self.gathers: list[int] = []

    def plan(self) -> PrefetchPlan:
        self._plan_keeping()
        self._plan_starts()
        return PrefetchPlan(
            tuple(self.uses), tuple(map(tuple, self.starts)), tuple(self.keeps), tuple(self.gathers), self.needed_numel
        )

    def _hold(self, start: int, stop: int, numel: int) -> None:
        for position in range(start, min(stop, len(self.live))):
            self.live[position] += numel

    def _fits(self, position: int, numel: int) -> bool:
        return self.live[position] + numel <= self.limits.live_numel

    def _plan_keeping(self) -> None:
        before = [0, *accumulate(self.numel)]
        for position, use in enumerate(self.uses):
            again = self.next[position]
            if again is None or use.bucket < 0 or before[again] - before[use.end] >= self.limits.reuse_numel:
                continue
            if all(self._fits(at, self.numel[position]) for at in range(use.end, again)):
                self.keeps[position] = True
                self._hold(use.end, again, self.numel[position])

    def _plan_starts(self) -> None:
        earliest = 0  # S3: not before the gather of an earlier use
        free_from: dict[int, int] = {}
        kept: set[int] = set()
        for position, use in enumerate(self.uses):
            if use.bucket >= 0 and use.bucket not in kept:
                self.gathers.append(position)
                first = max(earliest, free_from.get(use.bucket, 0))
                for index in range(len(self.exchanges[use.bucket])):
                    first = self._prefetch(position, index, first)
                earliest = max(earliest, first)
            free_from[use.bucket] = use.end
            (kept.add if self.keeps[position] else kept.discard)(use.bucket)

    def _prefetch(self, position: int, index: int, earliest: int) -> int:
        """Start exchange ``index`` of what is used at ``position`` as early as it fits; returns where."""
        bucket = self.uses[position].bucket
        carried = self.exchanges[bucket][index]
        buffer = self.numel[position] if index == 0 else 0
        at = position
        while at > earliest and self._fits(at - 1, buffer):
            if self.ahead[at - 1] + carried > self.limits.prefetch_numel:
                break
            at -= 1
        if at < position:
            self.starts[at].append(GatherStart(bucket, index + 1))
            self._hold(at, position, buffer)
            for between in range(at, position):
                self.ahead[between] += carried
        return at


@dataclass(slots=True)
class _Begun:
    bucket: int
    end: int = 0
    """0: it has not ended."""


@dataclass(slots=True)
class Schedule:
    """Records the order of uses, and follows the plan made of it as long as the order repeats itself."""

    exchanges: Sequence[Sequence[int]]
    limits: Limits
    plan: PrefetchPlan | None = None
    is_following: bool = False
    """Whether this iteration has gone by the plan so far. If not, this iteration's order is the next one's."""
    num_changes: int = 0
    """How often an order that was planned for did not repeat itself."""
    _begun: list[_Begun] = field(default_factory=list)
    _open: dict[int, int] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Uses that have begun in this iteration."""
        return len(self._begun)

    def expects(self, bucket: int) -> bool:
        """Whether a use of ``bucket`` is next by the plan; True without one. Changes nothing."""
        return self.plan is None or not self.is_following or self.planned == bucket

    @property
    def planned(self) -> int | None:
        """The bucket of the next use by the plan; None without one, or at its end."""
        if self.plan is None or not self.is_following or self.position == len(self.plan.uses):
            return None
        return self.plan.uses[self.position].bucket

    def leave_plan(self) -> None:
        """The order has changed: only record from here on."""
        self.is_following = False
        self.num_changes += 1

    def begin(self, bucket: int) -> tuple[GatherStart, ...]:
        """A use of ``bucket`` begins, the expected one; returns what to start now."""
        position = self.position
        self._begun.append(_Begun(bucket))
        self._open[bucket] = position
        if bucket == END_OF_BACKWARD:
            self.end(bucket)
        return self.plan.starts[position] if self.plan is not None and self.is_following else ()

    def upcoming(self) -> Iterator[int]:
        """The buckets that are gathered from here to the end of the iteration, in order; none without a plan."""
        if self.plan is not None and self.is_following:
            first = bisect_left(self.plan.gathers, self.position)
            yield from (self.plan.uses[position].bucket for position in self.plan.gathers[first:])

    def next_iteration(self) -> Iterator[int]:
        """The buckets that the next iteration gathers, in order."""
        if self.plan is not None and self.is_following:
            yield from (self.plan.uses[position].bucket for position in self.plan.gathers)

    def end(self, bucket: int) -> bool:
        """A use of ``bucket`` ends; returns whether to keep it full."""
        position = self._open.pop(bucket, None)
        if position is None:
            return False
        self._begun[position].end = self.position
        return self.plan is not None and self.is_following and self.plan.keeps[position]

    @property
    def is_as_planned(self) -> bool:
        """Whether the iteration, if it ended now, would have gone by the plan."""
        return self.plan is not None and self.is_following and self.position == len(self.plan.uses)

    def recorded(self) -> list[Use]:
        """The order of this iteration so far. What has not ended ends with the iteration."""
        return [Use(use.bucket, use.end or self.position) for use in self._begun]

    def restart(self, uses: Sequence[Use] | None = None) -> None:
        """Begin a new iteration; ``uses``: expect this order from now on."""
        if uses is not None:
            self.plan = make_plan(uses, self.exchanges, self.limits) if uses else None
        self.is_following = self.plan is not None
        self._begun.clear()
        self._open.clear()
