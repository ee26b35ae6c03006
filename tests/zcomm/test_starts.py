"""A store that outlives its ranks: each start agrees on a new prefix, whatever dead ranks have left there."""

# covers zcomm/_transport/store_exchange.py

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero
from tests.ranks import forkserver
from zcomm import CommunicationError
from zcomm._transport import store_exchange
from zcomm._transport.store_exchange import exchange_texts

SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


def _start(
    store: Any, ranks: Sequence[int], of: Sequence[int], timeout: timedelta = LONG, **timeouts: Any
) -> list[str]:
    """What each of ``ranks`` gets, a prefix or an error; the first rank arrives last. Timeouts by rank: r1=..."""

    def one(rank: int) -> str:
        time.sleep(0.02 * (rank == of[0]))
        try:
            return store_exchange.prefix_of_start(store, "here", of, rank, timeouts.get(f"r{rank}", timeout))
        except CommunicationError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_every_start_has_one_name_on_all_ranks_and_none_has_that_of_another() -> None:
    store = dist.HashStore()
    names = [_start(store, range(3), range(3)) for _ in range(4)]
    assert all(len(set(of_ranks)) == 1 for of_ranks in names)
    assert len({of_ranks[0] for of_ranks in names}) == 4
    assert all(of_ranks[0].startswith("here/") for of_ranks in names)


@pytest.mark.parametrize("dead", [[0, 1], [1, 2], [0, 2], [0], [2]])
def test_ranks_that_died_while_they_started_are_not_taken_for_new_ones(dead: list[int]) -> None:
    store = dist.HashStore()
    assert all("of ranks 0, 1, 2 not all came" in text for text in _start(store, dead, range(3), SHORT))
    new = _start(store, range(3), range(3))
    assert len(set(new)) == 1
    assert "not all" not in new[0]
    alone = _start(store, [0] if 0 in dead else [1], range(3), SHORT)[0]  # words and an offer of all ranks are there
    assert re.search(r"of a start: (0|1)", alone)


def test_a_late_rank_is_named_and_only_a_shared_store_costs_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    expected = "of ranks 4, 6, 7 not all came within 0.3 s of a start: 7"
    assert _start(store, [4, 6], (4, 6, 7), timedelta(seconds=0.3)) == [expected] * 2
    assert json.loads(store.get("here/start/offer"))[1][2] is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_exchange.prefix_of_start(store, "alone", range(3), 0, SHORT) == "alone"


@pytest.mark.parametrize("hasty", [4, 6])
def test_who_gives_up_first_gives_up_for_all_who_have_come(hasty: int) -> None:
    began = time.monotonic()
    timeouts = {f"r{hasty}": timedelta(seconds=0.3)}
    expected = "of ranks 4, 6, 7 not all came within 0.3 s of a start: 7"
    assert _start(dist.HashStore(), [4, 6], (4, 6, 7), LONG, **timeouts) == [expected] * 2
    assert time.monotonic() - began < LONG.total_seconds() / 2


def test_at_the_deadline_all_go_on_or_none() -> None:
    for gives_up, absent in ((None, ""), (5, "3"), (3, "5")):
        store = dist.HashStore()
        first, second = (store_exchange._NamespaceAgreement(store, (3, 5), rank) for rank in (3, 5))
        for rank in (first, second):
            rank.publish_word()
        assert first.poll() == ""  # an offer
        if gives_up == 3:  # its last poll was before the other took it
            outcomes = [first.give_up(SHORT), second.poll()]
        elif gives_up == 5:  # took it, and the first has not seen that yet
            assert second.poll() == ""
            outcomes = [second.give_up(SHORT), first.poll()]
        else:
            assert second.poll() == ""
            outcomes = [first.give_up(SHORT), second.give_up(SHORT)]
        text = f"of ranks 3, 5 not all came within 0.05 s of a start: {absent}"
        assert outcomes == [text if gives_up else store_exchange.GO] * 2


def _live(rank: int, port: int, folder: Path, start: int) -> None:
    """A rank of one start; the first start exits and leaves its keys in the store."""
    torch.set_num_threads(1)
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2",
    }  # fmt: skip
    agreements, said, agree = [], list[str](), store_exchange._NamespaceAgreement.agree

    def counted(start: Any, timeout: timedelta) -> str:
        agreements.append(start)
        return agree(start, timeout)

    store_exchange._NamespaceAgreement.agree = counted  # type: ignore[method-assign]
    zero.init_distributed("gloo", timeout=LONG)
    said += exchange_texts([0, 1], f"{start}.{rank}", lane="test", timeout=LONG)
    if rank == 1:  # reaches the next once the other has timed out
        while not (folder / f"{start}.0").exists():
            time.sleep(0.01)
    began = time.monotonic()
    try:
        exchange_texts([0, 1], "late", lane="test", timeout=SHORT if rank == 0 else LONG)
    except CommunicationError as error:
        said.append(str(error).split("\n", 1)[0])
    is_soon = time.monotonic() - began < LONG.total_seconds() / 2
    part = folder / f"part{rank}"
    part.write_text(json.dumps([len(agreements), is_soon, *said]))
    part.rename(folder / f"{start}.{rank}")
    if start and rank == 0:
        while not (folder / f"{start}.1").exists():
            time.sleep(0.01)
    os._exit(0)


def test_after_init_distributed_nobody_agrees_again_and_a_late_rank_learns_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # the server of forks, which may start here, would keep it
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(2):
        processes = [forkserver().Process(target=_live, args=(rank, agent.port, tmp_path, start)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
        expected = [1, True, f"{start}.0", f"{start}.1", "of ranks 0, 1 not all came within 0.05 s: 1"]
        assert [json.loads((tmp_path / f"{start}.{rank}").read_text()) for rank in range(2)] == [expected] * 2
