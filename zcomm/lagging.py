"""Which ranks lag, told from what each has started over each hop: part of the error of :mod:`zcomm.watch`."""

from __future__ import annotations

from typing import Any

__all__ = ["lagging"]


def lagging(hops: list[dict[str, Any]]) -> str:
    """Which ranks have started fewer exchanges than others over the same hop, and what each has not started.

    Args:
        hops: Of each rank, by the hop's name: its ranks, the number started, what is waited for, the last calls, and
            more.
    """
    told: dict[str, None] = {}
    for of_rank in hops:
        for key, (ranks, *_) in of_rank.items():
            accounts = {rank: hops[rank][key] for rank in ranks}
            most, calls = max(((account[1], account[3]) for account in accounts.values()), key=lambda both: both[0])
            for rank, account in accounts.items():
                num_started = account[1]
                missing = most - num_started
                if 0 < missing <= len(calls):
                    operation, nbytes = calls[len(calls) - missing][:2]
                    of = ", ".join(map(str, ranks))
                    text = f"rank {rank} lags in the exchanges of ranks {of}: it has started {num_started} of {most}"
                    told[f"{text}, and not number {num_started + 1}, {operation} of {nbytes} bytes"] = None
    return "".join(f"\n  {line}" for line in told)
