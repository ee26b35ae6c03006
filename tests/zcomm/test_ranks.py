"""The pool of live ranks: a failure is reported, and costs only its own test."""

# covers tests/ranks.py

from __future__ import annotations

import os
import time

import pytest
import torch

from tests import ranks
from tests.ranks import run_ranks


def _check_fails(rank: int, text: str) -> None:
    if rank == 1:
        raise ValueError(text)


def _check_dies(rank: int) -> None:
    if rank == 0:
        os._exit(7)


def _check_sleeps(rank: int) -> None:
    if rank == 1:
        time.sleep(100)


def _check_works(rank: int, numel: int) -> None:
    total = torch.full((numel,), float(rank))
    torch.distributed.all_reduce(total)
    assert torch.equal(total, torch.ones(numel))


def test_a_failed_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1:\n(.|\n)*ValueError: needle"):
        run_ranks(2, _check_fails, "needle")
    run_ranks(2, _check_works, 3)


def test_a_dead_rank_is_named_and_the_pool_built_anew() -> None:
    with pytest.raises(AssertionError, match="rank 0: died with exit code"):
        run_ranks(2, _check_dies)
    run_ranks(2, _check_works, 3)


def test_a_late_rank_is_named_and_the_pool_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(2, _check_works, 3)
    monkeypatch.setattr(ranks, "TIMEOUT_S", 1)
    with pytest.raises(AssertionError, match="rank 1: no answer in time"):
        run_ranks(2, _check_sleeps)
    monkeypatch.undo()
    run_ranks(2, _check_works, 3)


def test_ranks_stay_alive_between_tests() -> None:
    run_ranks(2, _check_works, 3)
    before = [process.pid for process in ranks._POOLS[2, "torch"].processes]
    run_ranks(2, _check_works, 4)
    assert [process.pid for process in ranks._POOLS[2, "torch"].processes] == before
