"""A rank dies or stops in a collective: the others raise within the process group's timeout, and none hangs."""

# covers zcomm/control.py

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import forkserver, use_emulated_nccl
from zcomm._transport import backend
from zcomm._transport.call_context import in_bucket
from zcomm._transport.collective_log import failing
from zcomm._transport.groups import new_group
from zcomm._transport.topology import hop_of_group
from zcomm.control import gather_to_first, scatter_from_first

TIMEOUT_S = 3
SLACK_S = 70  # for slow machines; a deadlock lasts longer
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


def _exchange_bytes(_: torch.Tensor, full: torch.Tensor) -> None:
    zcomm.all_to_all_single(torch.empty_like(full), full, format="int8:asym")


CASES = [
    (_gather, signal.SIGKILL, "torch"),
    (_gather_in_place, signal.SIGSTOP, "torch"),
    (_reduce_scatter, signal.SIGSTOP, "torch"),
    (_gather_later, signal.SIGKILL, "torch"),
    (_reduce_scatter_over_two_hops, signal.SIGSTOP, "torch"),
    (_reduce_scatter, signal.SIGSTOP, "nccl"),
    (_gather_later, signal.SIGKILL, "nccl"),
    (_reduce_scatter_over_two_hops, signal.SIGKILL, "nccl"),
    (_exchange_bytes, signal.SIGSTOP, "nccl"),
]
RANKS = 4


def _live(rank: int, store: str, call: Callable[..., None], over: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if over == "nccl":
        use_emulated_nccl()
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
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # destroying the group would wait for the rank that is gone


class _Job:
    """Ranks; the last one gets a signal while the others are in a collective."""

    def __init__(self, store: Path, call: Callable[..., None], number: signal.Signals, over: str) -> None:
        context = forkserver()
        self.name, self.number = f"{call.__name__} {number.name} {over}", number
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_live, args=(rank, str(store), call, over, there), daemon=True)
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
    """All cases run concurrently, as they spend their time waiting."""
    jobs = [_Job(tmp_path / str(i), *case) for i, case in enumerate(CASES)]
    try:
        for job in jobs:
            assert job.answers(RANKS, SLACK_S) == ["ready"] * RANKS
        for job in jobs:
            os.kill(job.processes[-1].pid, job.number)
        for job in jobs:
            for answer in job.answers(RANKS - 1, TIMEOUT_S + SLACK_S):
                assert answer.startswith("CommunicationError: "), (job.name, answer)
    finally:
        for process in (process for job in jobs for process in job.processes):
            process.kill()
            process.join()


def _gather_for_a_bucket() -> None:
    with in_bucket("layer 3"):
        zcomm.all_gather_single(torch.empty(2000), torch.ones(1000), format="int8")


def _gather_whole() -> None:
    zcomm.all_gather_single(torch.empty(2 * NUMEL), torch.ones(NUMEL))


ROWS = torch.ones(2, 1, dtype=torch.uint8)


def _make_group() -> None:
    with mock.patch.object(dist, "new_group", side_effect=dist.DistStoreError("wait timeout")):
        new_group([0, 1], None, is_local=False)


WAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "waited for": (_gather_for_a_bucket, r"all_gather of \d+ bytes, int8, bucket layer 3 \(number \d+\)"),
    "started": (_gather_whole, r"all_gather( of 1200000 bytes, none \(number \d+\))?"),
    "broadcast": (lambda: backend.broadcast_(torch.ones(3), 1, hop_of_group(None)), r"broadcast of 12 bytes, none .*"),
    "numbers": (lambda: backend.gather_ints(1, None), r"all_gather of one number of 24 bytes, none \(number \d+\)"),
    "to the first": (lambda: gather_to_first(torch.ones(1), hop_of_group(None)), "gather to the first.*"),
    "from the first": (lambda: scatter_from_first(ROWS, 1, hop_of_group(None)), "scatter from the first.*"),
    "a group": (_make_group, "making a process group"),
}


def _survive(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    _gather_for_a_bucket()
    if rank == 1:
        while not Path(f"{store}.both").exists():
            time.sleep(0.01)
        os._exit(0)
    Path(f"{store}.both").touch()
    errors: dict[str, tuple[str, bool]] = {}
    for name, (call, _) in WAYS.items():
        try:
            call()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}", isinstance(error.__cause__, RuntimeError)
    try:
        backend.sum_(torch.ones(2), dist.group.WORLD).wait()
    except RuntimeError as error:  # torch's futures keep the text of a callback's error, not its type
        errors["a plain sum"] = str(error).partition("callback: ")[2], True
    pipe.send(errors)
    os._exit(0)


@pytest.mark.timeout(SLACK_S)
def test_the_error_names_the_exchange_and_the_remedy(tmp_path: Path) -> None:
    here, there = forkserver().Pipe()
    processes = [forkserver().Process(target=_survive, args=(r, str(tmp_path / "store"), there)) for r in range(2)]
    try:
        for process in processes:
            process.start()
        assert here.poll(SLACK_S), "no answer in time"
        errors = here.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    wanted = {name: exchange for name, (_, exchange) in WAYS.items()} | {"a plain sum": "all_reduce"}
    assert errors.keys() == wanted.keys()
    for name, (text, has_cause) in errors.items():
        assert has_cause, name
        failed = f"CommunicationError: {wanted[name]} failed on rank 0 of ranks 0, 1: "
        assert re.match(failed + r".+\. A rank has ended .*ZCOMM_DEBUG=1", text), (name, text)


def test_what_this_rank_has_done_wrong_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(2**55)
    own = (zcomm.MessageError("a"), ValueError("a"), TypeError("a"), torch.OutOfMemoryError("a"), KeyboardInterrupt())
    for error in (no_memory.value, *own):
        with pytest.raises(type(error)) as caught, failing("all_gather", range(2)):
            raise error
        assert caught.value is error
    wanted = r"^all_gather failed: a\. A rank has ended"
    with pytest.raises(zcomm.CommunicationError, match=wanted) as of_torch, failing("all_gather", range(2)):
        raise RuntimeError("a.\nsecond line")
    assert str(of_torch.value.__cause__) == "a.\nsecond line"
