"""Show the progress of bench/large_model.py: what it waits for, bytes moved, memory of all ranks.

The first rank samples the memory of all ranks from /proc. RSS counts the pages of shared libraries in every process; it
is sampled every SAMPLE_S. PSS divides them among the processes that share them, but is slow to read; it is sampled
every PSS_SAMPLES times.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import zcomm
from zcomm import Topology
from zero._storage.transfer_counters import moved

SAMPLE_S = 0.2
PSS_SAMPLES = 10
WAITS = {"gather": "reading parameters", "reduce": "gradients"}
"""Labels of the phases of ZeroOptimizer.time_exchanges."""


@dataclass
class Peak:
    """Peak memory so far, in bytes."""

    rss: int = 0
    pss: int = 0
    by_phase: dict[str, int] = field(default_factory=dict)
    """Peak RSS by the phase that the first rank was waiting for."""

    def add(self, rss: int, pss: int, phase: str) -> None:
        """Add one sample."""
        self.rss, self.pss = max(self.rss, rss), max(self.pss, pss)
        self.by_phase[phase] = max(self.by_phase.get(phase, 0), rss)


class Watch:
    """A progress bar and a memory sampler, in a separate thread.

    Args:
        topology: The ranks; all of them on one machine.
        total: Steps of the bar.
    """

    def __init__(self, topology: Topology, total: int) -> None:
        self.peak = Peak()
        self.seconds: dict[str, float] = {}
        """Seconds that this rank has waited, by phase."""
        self._pids = _pids_of(topology)
        self._phases = ["building the model"]
        self._since_s = time.perf_counter()
        self._moved = moved()
        self._bar = tqdm(total=total, unit="step", disable=topology.rank != 0, dynamic_ncols=True, mininterval=0)
        self._loss = ""
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._is_first = topology.rank == 0

    def __enter__(self) -> Watch:
        self._moved.__enter__()
        if self._is_first:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        if self._is_first:
            self._thread.join()
        self._moved.__exit__()
        self._bar.close()

    @contextmanager
    def waiting_for(self, phase: str) -> Iterator[None]:
        """Count the time of the block as ``phase``, and not as the phase around it."""
        self._count()
        self._phases.append(WAITS.get(phase, phase))
        try:
            yield
        finally:
            self._count()
            self._phases.pop()

    def _count(self) -> None:
        now_s = time.perf_counter()
        phase = self._phases[-1]
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def step(self, loss: float) -> None:
        """Record the end of a training step, with its held-out loss."""
        self._loss = f" held-out loss {loss:.3f}"
        self._bar.update()

    def _watch(self) -> None:
        num_samples = 0
        while not self._is_ending.wait(SAMPLE_S):
            rss = sum(map(rss_of, self._pids))
            pss = sum(map(pss_of, self._pids)) if num_samples % PSS_SAMPLES == 0 else 0
            num_samples += 1
            phase = self._phases[-1]
            self.peak.add(rss, pss, phase)
            read, written = (self._moved.bytes(link=link) for link in ("read", "write"))
            self._bar.set_postfix_str(
                f"waits for: {phase};{self._loss} memory {rss / 2**30:.2f} GiB, read {read / 1e9:.1f} GB, "
                f"wrote {written / 1e9:.1f} GB"
            )


def _pids_of(topology: Topology) -> list[int]:
    """Return the process ids of all ranks."""
    pids = torch.zeros(topology.world_size)
    pids[topology.rank] = os.getpid()
    zcomm.all_reduce(pids, group=topology)
    return [int(pid) for pid in pids.tolist()]


def rss_of(pid: int) -> int:
    """Return the resident set size in bytes; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pss_of(pid: int) -> int:
    """Return the proportional set size in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
