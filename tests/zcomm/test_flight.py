"""The flight record: the last exchanges of a rank, also when a rank skips one."""

# covers zcomm/_transport/collective_log.py zcomm/_transport/flight_record.py

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zcomm
from tests.ranks import run_ranks
from zcomm import DivergedError, flight_record
from zcomm._transport.call_context import in_bucket
from zcomm._transport.collective_log import NUM_KEPT, CollectiveCall, CollectiveLog


def _gather(t: zcomm.Topology, numel: int) -> None:
    zcomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), t, format="none")


def _check_skipped_exchange(rank: int) -> None:
    t = zcomm.Topology(ranks_per_node=2)
    t.companion  # noqa: B018  (made at the first use)
    t.watch.period_s = 0.1
    for _ in range(70):
        _gather(t, 8)
    record = flight_record(t)
    assert len(record) == 64
    last = t.world.log.num_started
    assert [flight.number for flight in record] == list(range(last - 63, last + 1))
    assert {(flight.operation, flight.nbytes, flight.state) for flight in record} == {("all_gather", 32, "ended")}
    assert {(flight.format, flight.bucket) for flight in record} == {("none", "")}
    with in_bucket("layer 3"):
        works = [
            zcomm.all_gather_single(torch.empty(128), torch.ones(64), t, format="int8", async_op=True) for _ in "ab"
        ]
    assert [work.wait() for work in works if work is not None] == [None, None]
    assert {flight[-2:] for flight in flight_record(t)[-1:]} == {("int8", "layer 3")}
    last = t.world.log.num_started
    assert all(flight.ranks == (0, 1) and 0 <= flight.age_s < 200 for flight in record)
    behind = "rank 1 is behind in the exchanges of ranks 0, 1: "
    behind += f"it has started {last} of {last + 1}, and not number {last + 1}"
    with pytest.raises(DivergedError, match=rf"{behind}, all_gather of 64 bytes"):
        _gather(t if rank == 0 else t.companion, 16)  # rank 1 leaves one out
    _gather(t, 8)
    t.close()


def test_a_rank_that_leaves_out_an_exchange_is_named_with_it() -> None:
    run_ranks(2, _check_skipped_exchange)


def test_threads_do_not_disturb_one_another_in_a_ledger() -> None:
    log = CollectiveLog()
    is_over, looks = threading.Event(), 0

    def start(thread: int) -> list[tuple[int, int]]:
        return [
            (log.start(CollectiveCall("all_gather", 10_000 * thread + i, "cpu")), 10_000 * thread + i)
            for i in range(2000)
        ]

    def look() -> int:
        num_looks = 0
        while not is_over.is_set():
            numbers = [entry.number for entry in log.entries()]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            num_started, _, recent, _ = log.snapshot()
            assert len(recent) == min(num_started, NUM_KEPT)
            num_looks += 1
        return num_looks

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(5) as pool:
            looking = pool.submit(look)
            calls = [call for of_thread in pool.map(start, range(4)) for call in of_thread]
            is_over.set()
            looks = looking.result()
    finally:
        sys.setswitchinterval(before)
    assert sorted(number for number, _ in calls) == list(range(1, 8001))
    assert looks > 0
    assert {(entry.number, entry.call.nbytes) for entry in log.entries()} <= set(calls)
