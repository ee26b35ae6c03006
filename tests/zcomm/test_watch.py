"""The deadlock watch and the store, which may be unreachable."""

# covers zcomm/_transport/backend.py zcomm/_transport/deadlock_analysis.py zcomm/_transport/deadlock_watch.py

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest

from zcomm._transport import deadlock_watch
from zcomm._transport.backend import Hop
from zcomm._transport.collective_log import CollectiveCall
from zcomm._transport.deadlock_analysis import MissingCalls
from zcomm._transport.deadlock_watch import DeadlockWatch, Watched, start_missing


class _Store:
    """A store of two ranks, of which the second has left."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.num_asked = 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        self.answers.wait(60)
        return keys[0].endswith("/1")

    def get(self, key: str) -> bytes:
        return f"has ended ({key})".encode()


class _Counts:
    """A store that counts requests and contains no verdict."""

    def __init__(self) -> None:
        self.num_waiting = 0

    def add(self, key: str, number: int) -> int:
        assert key == "at/0/waiting"
        self.num_waiting += number
        return self.num_waiting

    def set(self, key: str, text: str) -> None:
        """Set the description of the rank's current call."""

    def check(self, keys: list[str]) -> bool:
        assert keys == ["at/0/verdict"]
        return False


def _watch_over(store: Any) -> DeadlockWatch:
    made: Any = object.__new__(DeadlockWatch)
    made._store, made._store_answers, made._prefix, made._rank, made._world_size = store, True, "at", 0, 2
    return made  # type: ignore[no-any-return]


def test_a_store_that_does_not_answer_holds_up_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a network cut the error of the exchange is still raised, and the store is not asked again."""
    monkeypatch.setattr(deadlock_watch, "ANSWER_S", 0.2)
    store = _Store()
    over = _watch_over(store)
    begin = time.monotonic()
    assert [over.departed("group") for _ in range(3)] == ["", "", ""]
    assert time.monotonic() - begin < 10
    assert store.num_asked == 1
    store.answers.set()


def test_what_ranks_that_left_have_said_is_told() -> None:
    store = _Store()
    store.answers.set()
    text = _watch_over(store).departed("group")
    assert "rank 1: has ended (at/left/group/1); rank 0: " in text


class _Samples:
    """A watch whose samples fail where ``fails`` says so."""

    period_s, has_reported = 0.0, False

    def __init__(self, fails: list[bool]) -> None:
        self.left = fails

    def sample(self) -> bool:
        if self.left.pop(0):
            raise RuntimeError("the store does not answer")
        return True


def test_a_store_that_fails_once_or_twice_does_not_end_the_watch() -> None:
    samples: Any = _Samples([True, True, False, True, True, True, False])
    deadlock_watch._serve(weakref.ref(samples), threading.Event())
    assert samples.left == [False]


def test_a_rank_that_gets_on_takes_back_what_it_has_told_and_nothing_else() -> None:
    store = _Counts()
    over: Any = _watch_over(store)
    over._rank, over._topologies, over._closed, over.num_deadlocks = 1, (), {}, 0
    over._last_sample, over._unproven, over._stacks, over._num_reports, over.has_reported = None, None, {}, 0, False
    before, later = (("waits in a barrier", {"hop": [number]}) for number in (1, 2))
    for account, num_waiting in [
        (before, 0), (None, 0), (before, 0), (later, 0),  # never the same twice: nothing reported
        (later, 1), (later, 1), (None, 0), (None, 0),
        (later, 0), (later, 1), (before, 0), (before, 1),
    ]:  # fmt: skip
        over._progress = lambda _, account=account: account
        over.sample()
        assert (store.num_waiting, over.has_reported) == (num_waiting, num_waiting == 1)


def test_reports_must_stay_the_same_also_in_whether_they_can_be_taken_for_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1. A rank that goes from a logged call to one that is not has the same text in both."""
    monkeypatch.setenv("ZCOMM_DIVERGED_AFTER_S", "0")
    over: Any = _watch_over(_Counts())
    over._unproven, over.period_s = None, 0.5
    for numbers, has_lasted in [((3, 0), False), ((3, 1), False), ((4, 2), True), ((4, 0), False), ((0, 0), True)]:
        reports = [[False, "waits", number, {}] for number in numbers]
        assert over._have_lasted(reports) == has_lasted, numbers


def test_a_rank_takes_part_only_in_what_it_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[tuple[int, CollectiveCall]]()
    monkeypatch.setattr("zcomm._transport.backend.start_for_others", lambda *asked: taken.append(asked[:2]))
    hop = Hop(None, 2, 0, 1, 0, "gloo")
    first, second, third = calls = [CollectiveCall("all_gather", nbytes, "cpu") for nbytes in (16, 32, 48)]
    for call in calls:
        hop.log.start(call)
    other = CollectiveCall("all_to_all", 48, "cpu")  # what the other rank has started as its third
    missing = MissingCalls(5, [(1, first), (2, second), (3, other), (3, third), (4, other), (5, first)], 2)
    start_missing(Watched("hop", hop.log, (0, 1), True, hop), missing)
    assert taken == [(3, other), (4, other), (5, first)]
    assert (hop.log.num_started, hop.log.num_pairs) == (5, 2)
