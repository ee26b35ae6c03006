"""A rank that dies or stops in a collective: the others get an error within the process group's timeout, no hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import forkserver

TIMEOUT_S = 3
SLACK_S = 70  # of a slow machine; a hang is for ever
NUMEL = 300_000


def _gather(shard: torch.Tensor, full: torch.Tensor) -> None:
    zcomm.all_gather_single(full, shard, format="int8")


def _gather_in_place(shard: torch.Tensor, full: torch.Tensor) -> None:
    zcomm.all_gather_single(full, shard)


def _reduce_scatter(shard: torch.Tensor, full: torch.Tensor) -> None:
    zcomm.reduce_scatter_single(shard, full, format="int4")


def _gather_later(shard: torch.Tensor, full: torch.Tensor) -> None:
    work = zcomm.all_gather_single(full, shard, async_op=True)
    assert work is not None
    work.wait()


def _reduce_scatter_over_two_hops(shard: torch.Tensor, full: torch.Tensor) -> None:
    zcomm.reduce_scatter_single(shard, full, group=_topology(), format=("int8", "int4"))


@cache
def _topology() -> zcomm.Topology:
    return zcomm.Topology(ranks_per_node=2)


CASES = [
    (_gather, signal.SIGKILL),
    (_gather_in_place, signal.SIGSTOP),
    (_reduce_scatter, signal.SIGSTOP),
    (_gather_later, signal.SIGKILL),
    (_reduce_scatter_over_two_hops, signal.SIGSTOP),
]
RANKS = 4


def _live(rank: int, store: str, call: Callable[..., None], pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    shard, full = torch.ones(NUMEL), torch.ones(RANKS * NUMEL)
    call(shard, full)
    pipe.send("ready")
    if rank == RANKS - 1:
        time.sleep(600)  # until the test kills or stops it
    try:
        call(shard, full)
        pipe.send("no error")
    except Exception as error:
        pipe.send(type(error).__name__)
    os._exit(0)  # destroying the group would wait for the rank that is gone


class _Job:
    """Ranks, of which the last will be sent a signal while the others are in a collective."""

    def __init__(self, store: Path, call: Callable[..., None], number: signal.Signals) -> None:
        context = forkserver()
        self.name, self.number = f"{call.__name__} {number.name}", number
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_live, args=(rank, str(store), call, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def answers(self, ranks: int, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        found = []
        for pipe in self.pipes[:ranks]:
            assert pipe.poll(max(0, deadline - time.monotonic())), f"{self.name}: no answer in time"
            found.append(pipe.recv())
        return found


@pytest.mark.timeout(4 * SLACK_S)
def test_the_others_get_an_error(tmp_path: Path) -> None:
    """All cases at once: they spend their time waiting."""
    jobs = [_Job(tmp_path / str(i), *case) for i, case in enumerate(CASES)]
    try:
        for job in jobs:
            assert job.answers(RANKS, SLACK_S) == ["ready"] * RANKS
        for job in jobs:
            os.kill(job.processes[-1].pid, job.number)
        for job in jobs:
            for answer in job.answers(RANKS - 1, TIMEOUT_S + SLACK_S):
                assert "Error" in answer, (job.name, answer)
    finally:
        for process in (process for job in jobs for process in job.processes):
            process.kill()
            process.join()
