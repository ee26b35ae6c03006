"""Do all ranks gather the same parameters? Asked before an exchange, so that the answer is an error and not a hang.

Exchanges of different parameters would meet each other: of equal size they give wrong numbers, else they never end. The
question travels over process groups of its own, by which nothing else is disturbed.
"""

from __future__ import annotations

import zlib

import torch

from zcomm import StateError, Topology, control, env

__all__ = ["OrderCheck"]


class OrderCheck:
    """Compares what the ranks are about to do.

    Args:
        topology: The ranks. Its companion's companion is made here, which is collective.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology.companion.companion if topology.world_size > 1 else topology
        self.is_always_on = env.is_set("ZERO_DEBUG")

    def compare(self, call: str) -> None:
        """Raise StateError, on every rank and with every rank's ``call``, unless all are equal. Collective.

        Cost for each rank: 8 bytes to every other rank, and one wait for the slowest.
        """
        if self._topology.world_size == 1:
            return
        mine = torch.tensor([float(zlib.crc32(call.encode()))], dtype=torch.float64)
        if len(set(control.gather_float64(mine, self._topology).flatten().tolist())) == 1:
            return
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(control.gather_texts(call, self._topology)):
            ranks_of.setdefault(text, []).append(rank)
        raise StateError(
            "every rank must run the same modules in the same order at stage 3, and now they differ: "
            + "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())
            + ". For layers that only some ranks use, take stage 1 or 2"
        )

    def agree_ends(self, ends: list[int]) -> list[int]:
        """The latest end of each use on any rank; as many on every rank."""
        return [int(v) for v in control.agree_max(torch.tensor(ends, dtype=torch.int64), self._topology).tolist()]
