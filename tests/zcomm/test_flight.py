"""The flight recorder, and what it says of a rank that leaves out an exchange."""

from __future__ import annotations

import pytest
import torch

import zcomm
from tests.ranks import run_ranks
from zcomm import DivergedError, flight_record


def _gather(t: zcomm.Topology, numel: int) -> None:
    zcomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), t, format="none")


def _check_skipped_exchange(rank: int) -> None:
    t = zcomm.Topology(ranks_per_node=2)
    watch = t.watch
    watch.period_s = 0.1
    for _ in range(70):
        _gather(t, 8)
    record = flight_record(t)
    assert len(record) == 64
    last = t.world.ledger.num_started
    assert [flight.number for flight in record] == list(range(last - 63, last + 1))
    assert {(flight.operation, flight.nbytes, flight.state) for flight in record} == {("all_gather", 32, "ended")}
    assert all(flight.ranks == (0, 1) and 0 <= flight.age_s < 200 for flight in record)
    lags = (
        rf"rank 1 lags in the exchanges of ranks 0, 1: it has started {last} of {last + 1}, and not number {last + 1}"
    )
    with pytest.raises(DivergedError, match=rf"{lags}, all_gather of 64 bytes"):
        _gather(t if rank == 0 else t.companion, 16)  # rank 1 leaves one out
    _gather(t, 8)
    t.close()


def test_a_rank_that_leaves_out_an_exchange_is_named_with_it() -> None:
    run_ranks(2, _check_skipped_exchange)
