"""Times of calls that all ranks take part in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from zcomm import control
from zcomm._bench import torch_calls
from zcomm._bench.harness import Timing, interleave
from zcomm._transport.topology import Topology

Key = TypeVar("Key")


def slowest_of_ranks(
    calls: Mapping[Key, Callable[[], Any]],
    topology: Topology,
    *,
    rounds: int,
    warmup: int,
    reset: Callable[[], None],
) -> dict[Key, Timing]:
    """Time ``calls`` in turn; of each the time of the slowest rank from a barrier on, the same on every rank.

    ``reset`` runs before each call, not timed.
    """

    def begin() -> None:
        reset()
        torch_calls.barrier()

    mine = interleave(calls, rounds=rounds, warmup=warmup, beginning=begin, ending=torch_calls.finish)
    slowest = {}
    for key, timing in mine.items():
        of_ranks = control.gather_float64(torch.tensor(timing.seconds, dtype=torch.float64), topology)
        slowest[key] = Timing(tuple(of_ranks.amax(0).tolist()))
    return slowest
