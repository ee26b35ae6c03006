"""Time collectives: of each call the time of the slowest rank."""

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
    """Time ``calls`` interleaved: from a barrier to the end of the slowest rank. Every rank returns the same times.

    ``reset`` runs before each call, untimed.
    """

    def start() -> None:
        reset()
        torch_calls.barrier()  # or a call's time would include waiting for ranks that are still in the call before

    mine = interleave(calls, rounds=rounds, warmup=warmup, before_each=start, after_each=torch_calls.finish)
    slowest = {}
    for key, timing in mine.items():
        of_ranks = control.gather_float64(torch.tensor(timing.seconds, dtype=torch.float64), topology)
        slowest[key] = Timing(tuple(of_ranks.amax(0).tolist()))
    return slowest
