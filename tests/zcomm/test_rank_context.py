"""Several ranks in one process: each has its own counts, names and watches, and its clock."""

# covers zcomm/_base/lazy.py zcomm/_base/rank_context.py

from __future__ import annotations

import threading
import time
from contextvars import ContextVar

import zcomm
from zcomm._base.daemon_threads import DaemonThread, start_daemon
from zcomm._base.lazy import lazy
from zcomm._base.pending import ends_within
from zcomm._base.rank_context import PerRank, RankContext, bound, clock
from zcomm._transport.traffic import TrafficKey, record


class SteppedClock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds


class NeverComplete:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return False


def test_ranks_of_one_process_count_apart() -> None:
    key, ranks = TrafficKey("all_gather", "int8", "inter"), [RankContext(), RankContext()]
    for number, rank in enumerate(ranks):
        with rank.inside():
            record(key, number + 1, 10, 10)
    with zcomm.traffic() as outside:
        for number, rank in enumerate(ranks):
            with rank.inside(), zcomm.traffic() as of_rank:
                record(key, 5, 10, 10)
            assert of_rank.calls() == 5
            with rank.inside():
                assert zcomm.traffic().calls() == number + 6
    assert outside.calls() == 0


def test_topologies_of_two_ranks_have_the_same_names() -> None:
    keys = []
    for _ in range(2):
        with RankContext().inside():
            topologies = [zcomm.Topology(ranks_per_node=1) for _ in range(2)]
            keys.append([topology.key for topology in topologies])
            for topology in topologies:
                topology.close()
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2


def test_threads_belong_to_the_rank_that_started_them() -> None:
    variable, found, rank = PerRank(list[str]), dict[str, list[str]](), RankContext()
    with rank.inside():
        mine = variable()
        start_daemon(lambda: found.__setitem__("daemon", variable()), "test-context").join()
        thread, ran = DaemonThread("test-context"), threading.Event()
        thread.run(lambda: (found.__setitem__("queue", variable()), ran.set())[1])
        assert ran.wait(30)
        thread.end()
        call = bound(lambda: found.__setitem__("bound", variable()))
    other = threading.Thread(target=call)
    other.start()
    other.join()
    assert all(found[name] is mine for name in ("daemon", "queue", "bound"))
    assert variable() is not mine


def test_timeouts_count_by_the_clock_of_the_rank() -> None:
    began, stepped = time.monotonic(), SteppedClock()
    with RankContext(stepped).inside():
        assert not ends_within(NeverComplete(), 3600.0)
        assert clock() is stepped
    assert stepped.now_s >= 1e6 + 3600
    assert time.monotonic() - began < 60
    assert clock() is not stepped


class Maker:
    num_made = 0

    @lazy
    def value(self) -> int:
        self.num_made += 1
        time.sleep(0.05)
        return self.num_made


def test_a_lazy_value_is_made_once_by_threads_and_apart_for_each_object() -> None:
    maker, other, found = Maker(), Maker(), list[int]()
    threads = [threading.Thread(target=lambda: found.append(maker.value)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert other.value == 1
    for thread in threads:
        thread.join()
    assert (found, maker.num_made, other.num_made) == ([1, 1, 1, 1], 1, 1)


def test_threads_keep_no_context_variables_of_their_caller() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    variable.set(1)
    found = list[int]()
    start_daemon(lambda: found.append(variable.get()), "test-context").join()
    assert found == [0]


def test_a_value_is_made_at_the_first_use_only() -> None:
    made = []
    variable = PerRank(lambda: made.append(1) or made)  # type: ignore[func-returns-value]
    assert variable() is variable()
    assert made == [1]
