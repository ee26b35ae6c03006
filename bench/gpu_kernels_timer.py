"""Time interleaved calls on a device: on a GPU by CUDA events with cold caches, on the CPU by the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zcomm._bench.harness import Timing, interleave

__all__ = ["Timer"]

HOST_LEAD_CYCLES = 400_000
"""The GPU waits this long (about 0.2 ms) before a timed call, so that the host is ahead and launch time is hidden."""
LEAST_FLUSH_NBYTES = 64 * 2**20


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        """Allocate the memory whose filling evicts everything from the L2 cache."""
        self._device = device
        if device.type == "cuda":
            cache_nbytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(max(2 * cache_nbytes, LEAST_FLUSH_NBYTES), dtype=torch.uint8, device=device)

    def times(self, calls: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
        """Time the calls interleaved, once a round, after a warm-up round."""
        if self._device.type != "cuda":
            return interleave(calls, rounds=rounds)
        events = {name: [_two_events() for _ in range(rounds + 1)] for name in calls}
        for index in range(rounds + 1):
            for name, call in calls.items():
                start, end = events[name][index]
                self._flush.zero_()
                torch.cuda._sleep(HOST_LEAD_CYCLES)
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
        return {
            name: Timing(tuple(start.elapsed_time(end) * 1e-3 for start, end in pairs[1:]))
            for name, pairs in events.items()
        }


def _two_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
