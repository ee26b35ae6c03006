"""Which ranks lag, told from what each has started over each hop: part of the error of :mod:`zcomm.watch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zcomm.verdict import Account

__all__ = ["lagging"]


def lagging(world: Sequence[Mapping[str, Account]]) -> str:
    """Which ranks have started fewer exchanges than others over the same hop, and what each has not started.

    Args:
        world: Of each rank, by the hop's name, what it has started.
    """
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
