"""Can ranks that wait ever go on? If not, who lags, and what does each owe the others? From what they tell, no I/O.

An exchange ends on a rank once all ranks that it needs have started the exchange of that number with an equal call.
With ZCOMM_CHECK=1, one of two hops ends once all ranks of all nodes have started theirs of that number among those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zcomm._transport.collective_log import NUM_KEPT, CollectiveCall
from zcomm._transport.tagged import needed, tag_of


class RankProgress(NamedTuple):
    """What one rank has started over a hop, and what of it it waits for."""

    ranks: list[int]
    """Of the hop."""
    kind: str
    """Hops of one kind, between them, hold every rank once."""
    sends: bool
    """Whether exchanges meet by tag."""
    num_started: int
    last_broken: int
    waits: list[int]
    recent: list[CollectiveCall]
    """The last calls."""
    num_beside: int

    @classmethod
    def read(cls, told: list[Any]) -> RankProgress:
        """The one that was told as JSON."""
        return cls(*told)._replace(recent=[CollectiveCall(*call) for call in told[6]])

    def call(self, number: int) -> CollectiveCall | None:
        """That of exchange ``number``, if it is known."""
        place = number - self.num_started + len(self.recent) - 1
        return self.recent[place] if 0 <= place < len(self.recent) else None

    def has(self, number: int, call: CollectiveCall) -> bool:
        """Whether ``call`` was started as exchange ``number``."""
        mine = self.call(number)
        if mine is None or not self.sends:
            return number <= self.num_started
        return tag_of(number, mine) == tag_of(number, call)

    def has_beside(self, call: CollectiveCall) -> bool:
        """Whether the same was started that ends with the other hop's, in whatever place."""
        mine = [one for one in self.recent if one.beside == call.beside]
        return tag_of(0, mine[0]) == tag_of(0, call) if mine else call.beside <= self.num_beside


class Owed(NamedTuple):
    """What is needed for all exchanges of a hop to end."""

    until: int
    """As many exchanges."""
    calls: list[tuple[int, CollectiveCall]]
    """Each of them that some rank has not started, by number; several of one number where calls differ."""
    num_beside: int


Hops = Mapping[str, RankProgress]
"""What one rank tells, by hop."""


def will_end(world: Sequence[Hops]) -> bool:
    """Whether anything that a rank waits for ends by itself."""
    return any(
        _ends(world, rank, key, number)
        for rank, hops in enumerate(world)
        for key, account in hops.items()
        for number in account.waits
    )


def _ends(world: Sequence[Hops], rank: int, key: str, number: int) -> bool:
    mine = world[rank][key]
    call = mine.call(number)
    if call is None:  # too long ago for anybody to be behind
        return True
    for place in needed(call, mine.ranks.index(rank), len(mine.ranks)):
        theirs = world[mine.ranks[place]].get(key)
        if theirs is None or not theirs.has(number, call):
            return False
    if not call.beside:
        return True
    rows = [account for hops in world for account in hops.values() if account.kind == mine.kind]
    return all(account.has_beside(call) for account in rows)


def lagging(world: Sequence[Hops]) -> str:
    """Which ranks have started fewer exchanges than others over the same hop, and what each has not started."""
    told: dict[str, None] = {}
    for of_rank in world:
        for key, one in of_rank.items():
            accounts = {rank: world[rank][key] for rank in one.ranks if key in world[rank]}
            furthest = max(accounts.values(), key=lambda account: account.num_started)
            for rank, account in accounts.items():
                started, most = account.num_started, furthest.num_started
                call = furthest.call(started + 1)
                if call is not None:
                    text = f"rank {rank} lags in the exchanges of ranks {', '.join(map(str, one.ranks))}"
                    text += f": it has started {started} of {most}, and not number {started + 1}"
                    told[f"{text}, {call.operation} of {call.nbytes} bytes"] = None
    return "".join(f"\n  {line}" for line in told)


def owed_of(world: Sequence[Hops]) -> dict[str, Owed]:
    """By hop, what all its ranks together must still start."""
    rows: dict[str, list[RankProgress]] = {}
    for hops in world:
        for key, account in hops.items():
            rows.setdefault(key, []).append(account)
    found = {key: _owed(accounts) for key, accounts in rows.items()}
    for key, accounts in rows.items():
        of_kind = [account for other in rows.values() for account in other if account.kind == accounts[0].kind]
        counts = [account.num_beside for account in of_kind]
        until, calls, num_beside = found[key].until, list(found[key].calls), max(counts)
        ahead = {tag_of(0, call): call for account in of_kind for call in account.recent if call.beside > min(counts)}
        for tag, call in ahead.items():  # begun by all of one row, or some, and in other rows by nobody
            if not any(tag_of(0, one) == tag for account in accounts for one in account.recent):
                until += 1
                calls.append((until, call))
        found[key] = Owed(until, calls, num_beside)
    return found


def _owed(accounts: Sequence[RankProgress]) -> Owed:
    until, done = max(a.num_started for a in accounts), max(a.last_broken for a in accounts)
    is_everywhere, calls = len(accounts) == len(accounts[0].ranks), []
    for number in range(max(done, until - NUM_KEPT) + 1, until + 1):
        known = {tag_of(number, call): call for a in accounts if (call := a.call(number)) is not None}
        distinct = list(known.values()) if accounts[0].sends else list(known.values())[:1]
        lacks = not is_everywhere or any(a.num_started < number for a in accounts)
        if lacks or len(distinct) > 1:
            calls += [(number, call) for call in distinct]
    return Owed(until, calls, 0)
