"""Prefetch plan: when to gather each bucket and which to keep, from the recorded order of uses. Arithmetic only.

An iteration is one optimizer step (all its micro-batches, forward and backward), or one forward without gradients. A
*use* of a bucket starts when its full parameters are first needed, and ends when nothing needs them any more:

    use         0             1             2          3 ...                   position: uses started so far
    bucket      wte           block 0       block 1    block 1 (backward)
    plan        prefetch 1    prefetch 2    keep, no gather for 3

Invariants:
    S1  A plan depends on the order of uses, where each ended, sizes and limits, all equal on every rank; never on
        time. If it did, ranks would start gathers in different orders, and deadlock.
    S2  At every position, at most ``prefetch_numel`` elements are prefetched and not in use yet. Nothing is prefetched
        or kept that makes the live elements exceed ``live_numel``; uses alone may exceed it.
    S3  Gathers start in the order of the uses they are for, each after the previous use of its bucket has ended.
    S4  If the order changes, the rest of that iteration has no prefetches; results stay right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

END_OF_BACKWARD = -1
"""Stands in the recorded order where a backward ends; it has no elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a plan, in elements."""

    prefetch_numel: int
    """At most so many are gathered ahead of their use; 0: none."""
    live_numel: int
    """At most so many are full at a time, unless modules in use need more."""
    reuse_numel: int
    """A bucket is kept if fewer elements are used before its next use; 0: never."""


class Use(NamedTuple):
    """One use of a bucket; its index in the order is the position at which it starts."""

    bucket: int
    end: int
    """How many uses had started when it ended."""


class Prefetch(NamedTuple):
    """Start the exchanges of ``bucket`` up to, not including, number ``stop``."""

    bucket: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What to do at each position of a recorded order."""

    uses: tuple[Use, ...]
    prefetches: tuple[tuple[Prefetch, ...], ...]
    """What to prefetch when a use starts, after its own gather has started."""
    keeps: tuple[bool, ...]
    """Whether the bucket stays full from the end of a use to its next use."""
    gathers: tuple[int, ...]
    """Positions of the uses that need a gather."""
    needed_numel: int
    """The largest number of elements in use at a time."""


def make_plan(uses: Sequence[Use], exchanges: Sequence[Sequence[int]], limits: Limits) -> PrefetchPlan:
    """Plan an iteration.

    Args:
        uses: The expected order. Uses of one bucket do not overlap.
        exchanges: For each bucket, the elements that each exchange of its gather carries, in order.
        limits: How much may be prefetched and kept.
    """
    planner = _Planner(uses, exchanges, limits)
    planner.plan_keeping()
    planner.plan_prefetches()
    prefetches = tuple(map(tuple, planner.prefetches))
    return PrefetchPlan(tuple(uses), prefetches, tuple(planner.keeps), tuple(planner.gathers), planner.needed_numel)


class _Planner:
    def __init__(self, uses: Sequence[Use], exchanges: Sequence[Sequence[int]], limits: Limits) -> None:
        self.uses, self.exchanges, self.limits = uses, exchanges, limits
        self.numel = [0 if use.bucket < 0 else sum(exchanges[use.bucket]) for use in uses]
        """Elements of each use's bucket."""
        self.live = [0] * len(uses)
        """Elements that are full or being gathered, from each position to the next."""
        self.ahead = [0] * len(uses)
        """Of these, the ones prefetched for later uses."""
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
        self.prefetches: list[list[Prefetch]] = [[] for _ in uses]
        self.gathers: list[int] = []

    def _hold(self, start: int, stop: int, numel: int) -> None:
        for position in range(start, min(stop, len(self.live))):
            self.live[position] += numel

    def _fits(self, position: int, numel: int) -> bool:
        return self.live[position] + numel <= self.limits.live_numel

    def plan_keeping(self) -> None:
        before = [0, *accumulate(self.numel)]
        for position, use in enumerate(self.uses):
            again = self.next[position]
            if again is None or use.bucket < 0 or before[again] - before[use.end] >= self.limits.reuse_numel:
                continue
            if all(self._fits(at, self.numel[position]) for at in range(use.end, again)):
                self.keeps[position] = True
                self._hold(use.end, again, self.numel[position])

    def plan_prefetches(self) -> None:
        earliest = 0  # S3: not before the gathers of earlier uses have started
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
        """Start exchange ``index`` of the gather for ``position`` as early as it fits; returns that position."""
        bucket = self.uses[position].bucket
        carried = self.exchanges[bucket][index]
        buffer = self.numel[position] if index == 0 else 0
        at = position
        while at > earliest and self._fits(at - 1, buffer):
            if self.ahead[at - 1] + carried > self.limits.prefetch_numel:
                break
            at -= 1
        if at < position:
            self.prefetches[at].append(Prefetch(bucket, index + 1))
            self._hold(at, position, buffer)
            for between in range(at, position):
                self.ahead[between] += carried
        return at


@dataclass(slots=True)
class Schedule:
    """Records the order of uses, and follows the plan made of it as long as the order repeats itself."""

    exchanges: Sequence[Sequence[int]]
    limits: Limits
    plan: PrefetchPlan | None = None
    is_following: bool = False
    """Whether this iteration has followed the plan so far. If not, its order makes the next plan."""
    _recorded: list[list[int]] = field(default_factory=list)
    """The bucket of each use so far, and where the use ended; 0: it has not."""
    _in_use: dict[int, int] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Uses that have started in this iteration."""
        return len(self._recorded)

    def expects(self, bucket: int) -> bool:
        """Whether the plan has a use of ``bucket`` next; True without a plan."""
        return self.plan is None or not self.is_following or self.planned == bucket

    @property
    def planned(self) -> int | None:
        """The bucket that the plan has next; None without a plan, or at its end."""
        if self.plan is None or not self.is_following or self.position == len(self.plan.uses):
            return None
        return self.plan.uses[self.position].bucket

    def leave_plan(self) -> None:
        """The order has changed: only record for the rest of the iteration."""
        self.is_following = False

    def start_use(self, bucket: int) -> tuple[Prefetch, ...]:
        """Record the start of a use of ``bucket``, which must be the expected one; returns what to prefetch now."""
        position = self.position
        self._recorded.append([bucket, 0])  # at once: an interrupt must not leave half of it
        self._in_use[bucket] = position
        if bucket == END_OF_BACKWARD:
            self.end_use(bucket)
        return self.plan.prefetches[position] if self.plan is not None and self.is_following else ()

    def upcoming(self) -> Iterator[int]:
        """The buckets still to be gathered in this iteration, in order; none without a plan."""
        if self.plan is not None and self.is_following:
            first = bisect_left(self.plan.gathers, self.position)
            yield from (self.plan.uses[position].bucket for position in self.plan.gathers[first:])

    def next_iteration(self) -> Iterator[int]:
        """The buckets that the next iteration gathers, in order."""
        if self.plan is not None and self.is_following:
            yield from (self.plan.uses[position].bucket for position in self.plan.gathers)

    def end_use(self, bucket: int) -> bool:
        """Record the end of a use of ``bucket``; returns whether to keep it full."""
        position = self._in_use.pop(bucket, None)
        if position is None:
            return False
        self._recorded[position][1] = self.position
        return self.plan is not None and self.is_following and self.plan.keeps[position]

    @property
    def is_as_planned(self) -> bool:
        """Whether the iteration, if it ended now, would have followed the plan."""
        return self.plan is not None and self.is_following and self.position == len(self.plan.uses)

    def recorded(self) -> list[Use]:
        """The order of this iteration so far. Uses that have not ended end with the iteration."""
        return [Use(bucket, end or self.position) for bucket, end in self._recorded]

    def restart(self, uses: Sequence[Use] | None = None) -> None:
        """Start a new iteration; ``uses``: plan for this order from now on."""
        if uses is not None:
            self.plan = make_plan(uses, self.exchanges, self.limits) if uses else None
        self.is_following = self.plan is not None
        self._recorded.clear()
        self._in_use.clear()
