"""Is this a deadlock? If so, which ranks are behind, and which exchanges are missing? Pure functions, no I/O.

Input: what every rank reports about its hops. An exchange completes on a rank once all ranks that it needs have started
the exchange of that number with an equal call. With ZCOMM_CHECK=1 a paired exchange completes only once the ranks of
all nodes have started theirs of the same pair number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zcomm._transport.collective_log import NUM_KEPT, CollectiveCall
from zcomm._transport.tagged import ranks_needed, tag_of


class RankProgress(NamedTuple):
    """What one rank has started over a hop, and which of it it waits for."""

    ranks: list[int]
    """The ranks of the hop."""
    kind: str
    """Every rank is in exactly one hop of each kind."""
    is_tagged: bool
    """Whether exchanges are matched by tag; otherwise by their order."""
    num_started: int
    last_broken: int
    waits: list[int]
    recent: list[CollectiveCall]
    num_pairs: int

    @classmethod
    def from_json(cls, fields: list[Any]) -> RankProgress:
        return cls(*fields)._replace(recent=[CollectiveCall(*call) for call in fields[6]])

    def call(self, number: int) -> CollectiveCall | None:
        """The call of exchange ``number``, if it is still known."""
        place = number - self.num_started + len(self.recent) - 1
        return self.recent[place] if 0 <= place < len(self.recent) else None

    def has(self, number: int, call: CollectiveCall) -> bool:
        mine = self.call(number)
        if mine is None or not self.is_tagged:
            return number <= self.num_started
        return tag_of(number, mine) == tag_of(number, call)

    def has_pair(self, call: CollectiveCall) -> bool:
        """Whether the paired exchange ``call`` was started, under whatever number."""
        mine = [one for one in self.recent if one.pair_number == call.pair_number]
        return any(tag_of(0, one) == tag_of(0, call) for one in mine) if mine else call.pair_number <= self.num_pairs

    @property
    def unbroken(self) -> list[CollectiveCall]:
        """The last calls, without those that an earlier verdict has completed."""
        return self.recent[-(self.num_started - self.last_broken) :] if self.num_started > self.last_broken else []

    @property
    def num_forgotten_pairs(self) -> int:
        """Paired exchanges up to this number may have been started before :attr:`recent`."""
        if len(self.recent) < NUM_KEPT:
            return 0
        return min((call.pair_number for call in self.recent if call.pair_number), default=self.num_pairs + 1) - 1


class MissingCalls(NamedTuple):
    """What the ranks of a hop must start for all exchanges of the hop to complete."""

    until: int
    """The number of exchanges after that, the same on every rank."""
    calls: list[tuple[int, CollectiveCall]]
    """Number and call of each exchange that some rank has not started; a number occurs twice if the calls differ."""
    num_pairs: int


Hops = Mapping[str, RankProgress]
"""The report of one rank, by hop."""


def will_end(world: Sequence[Hops]) -> bool:
    """Whether some exchange that a rank waits for will complete: there is no deadlock."""
    return any(
        _ends(world, rank, key, number)
        for rank, hops in enumerate(world)
        for key, progress in hops.items()
        for number in progress.waits
    )


def _ends(world: Sequence[Hops], rank: int, key: str, number: int) -> bool:
    mine = world[rank][key]
    call = mine.call(number)
    if call is None:  # more than NUM_KEPT exchanges ago: every rank has started it
        return True
    for place in ranks_needed(call, mine.ranks.index(rank), len(mine.ranks)):
        theirs = world[mine.ranks[place]].get(key)
        if theirs is None or not theirs.has(number, call):
            return False
    if not call.pair_number:
        return True
    rows = [progress for hops in world for progress in hops.values() if progress.kind == mine.kind]
    return all(progress.has_pair(call) for progress in rows)


def ranks_behind(world: Sequence[Hops]) -> str:
    """One line for each rank that has started fewer exchanges than others over the same hop, with the next of them."""
    lines: dict[str, None] = {}
    for of_rank in world:
        for key, one in of_rank.items():
            progresses = {rank: world[rank][key] for rank in one.ranks if key in world[rank]}
            furthest = max(progresses.values(), key=lambda progress: progress.num_started)
            for rank, progress in progresses.items():
                started, most = progress.num_started, furthest.num_started
                call = furthest.call(started + 1)
                if call is not None:
                    text = f"rank {rank} is behind in the exchanges of ranks {', '.join(map(str, one.ranks))}"
                    text += f": it has started {started} of {most}, and not number {started + 1}"
                    lines[f"{text}, {call.operation} of {call.nbytes} bytes"] = None
    return "".join(f"\n  {line}" for line in lines)


def missing_calls_of(world: Sequence[Hops]) -> dict[str, MissingCalls]:
    """By hop, the exchanges that some of its ranks must still start."""
    rows: dict[str, list[RankProgress]] = {}
    for hops in world:
        for key, progress in hops.items():
            rows.setdefault(key, []).append(progress)
    found = {key: _missing_calls(progresses) for key, progresses in rows.items()}
    for key, progresses in rows.items():
        # With ZCOMM_CHECK=1 a paired call must be started on the hops of all nodes, also where no rank has started it,
        # or another one of that pair number.
        of_kind = [progress for other in rows.values() for progress in other if progress.kind == progresses[0].kind]
        until, calls = found[key].until, list(found[key].calls)
        known = {tag_of(0, call) for progress in progresses for call in progress.recent}
        num_forgotten = max(progress.num_forgotten_pairs for progress in progresses)
        paired = [call for progress in of_kind for call in progress.unbroken if call.pair_number > num_forgotten]
        for tag, call in {tag_of(0, call): call for call in paired}.items():
            if tag not in known:
                until += 1
                calls.append((until, call))
        found[key] = MissingCalls(until, calls, max(progress.num_pairs for progress in of_kind))
    return found


def _missing_calls(progresses: Sequence[RankProgress]) -> MissingCalls:
    until, done = max(a.num_started for a in progresses), max(a.last_broken for a in progresses)
    is_everywhere, calls = len(progresses) == len(progresses[0].ranks), []
    for number in range(max(done, until - NUM_KEPT) + 1, until + 1):
        known = {tag_of(number, call): call for a in progresses if (call := a.call(number)) is not None}
        distinct = list(known.values()) if progresses[0].is_tagged else list(known.values())[:1]
        lacks = not is_everywhere or any(a.num_started < number for a in progresses)
        if lacks or len(distinct) > 1:
            calls += [(number, call) for call in distinct]
    return MissingCalls(until, calls, 0)
