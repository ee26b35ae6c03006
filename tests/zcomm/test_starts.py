"""A store that outlives its ranks: a start gets a name of its own, whatever dead ranks have left."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from zcomm import CommunicationError, starts

SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def _start(store: Any, ranks: Sequence[int], size: int, timeout: timedelta = LONG) -> list[str]:
    """What each of ``ranks`` gets; rank 0 comes last."""

    def one(rank: int) -> str:
        time.sleep(0.02 * (rank == 0))
        return starts.prefix_of_start(store, "here", rank, size, timeout)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_every_start_has_one_name_on_all_ranks_and_none_has_that_of_another() -> None:
    store = dist.HashStore()
    names = [_start(store, range(3), 3) for _ in range(4)]
    assert all(len(set(of_ranks)) == 1 for of_ranks in names)
    assert len({of_ranks[0] for of_ranks in names}) == 4


@pytest.mark.parametrize("dead", [[0, 1], [1, 2], [0, 2], [0], [2]])
def test_ranks_that_died_while_they_started_are_not_taken_for_new_ones(dead: list[int]) -> None:
    store = dist.HashStore()
    with pytest.raises(CommunicationError, match="of 3 ranks not all came"):
        _start(store, dead, 3, SHORT)
    assert len(set(_start(store, range(3), 3))) == 1
    with pytest.raises(CommunicationError, match=r"of a start: (0|1)"):
        _start(store, [0] if 0 in dead else [1], 3, SHORT)  # words and an offer of all ranks are there


def test_a_late_rank_is_named_and_only_a_shared_store_costs_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    with pytest.raises(CommunicationError, match=r"of a start: 2$"):
        _start(store, [0, 1], 3, timedelta(seconds=0.3))
    assert json.loads(store.get("here/start/offer"))[1][2] is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert starts.prefix_of_start(store, "alone", 0, 3, SHORT) == "alone"
