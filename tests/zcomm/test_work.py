"""Running collectives: the thread of a Topology, errors, closing, the guarantees of a Work."""

# covers zcomm/_transport/work.py

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import zcomm
from tests.ranks import run_ranks
from zcomm import StateError, Topology
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog, TrackedWork
from zcomm._transport.work import Steps, Work, WorkQueue, nothing, run

ANY = torch.empty(0)


class Exchange:
    """An exchange that completes when the test sets its event."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended, self.error = threading.Event(), error

    def wait(self) -> None:
        assert self.ended.wait(20), "the exchange was not ended"
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.ended.is_set()


def _steps(log: list[str], name: str, *exchanges: Exchange) -> Steps:
    log.append(f"{name} starts")
    yield from exchanges
    log.append(f"{name} ends")


def _submitted(queue: WorkQueue, steps: Steps) -> Work:
    work = run(steps, ANY, async_op=True, queue=queue, num_exchanges=2)
    assert work is not None
    return work


@pytest.mark.parametrize("kind", [zcomm.MessageError, zcomm.CommunicationError])
def test_a_collective_that_failed_keeps_neither_its_tensors_nor_its_queue(kind: type[Exception]) -> None:
    """The queue's thread waits for the next one with nothing of the last, and ends with its queue."""

    def steps(route: SimpleNamespace, tensor: torch.Tensor) -> Steps:
        yield None
        raise kind(f"{route} {tensor.shape}")

    route, tensor = SimpleNamespace(queue=WorkQueue()), torch.zeros(10)
    kept, thread = (weakref.ref(route.queue), weakref.ref(tensor)), None
    work = route.queue.submit(steps(route, tensor))
    with pytest.raises(kind):
        work.wait()
    assert not route.queue.is_idle or route.queue._last is None
    thread = route.queue._thread
    assert thread is not None
    del work, route, tensor
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert [one() for one in kept] == [None, None]


def test_what_waits_behind_a_lost_rank_fails_with_an_error_of_its_own() -> None:
    queue, log, lost = WorkQueue(), list[str](), Exchange(RuntimeError("Connection closed by peer"))
    hop_log = CollectiveLog()
    number = hop_log.start(CollectiveCall("all_gather", 1, "cpu"))
    works = [_submitted(queue, _steps(log, "a", TrackedWork(lost, hop_log, number, [0, 1])))]  # type: ignore[arg-type]
    works += [_submitted(queue, _steps(log, name, Exchange())) for name in "bc"]
    lost.ended.set()
    errors = []
    for work in works:
        with pytest.raises(zcomm.CommunicationError, match="Connection closed by peer") as error:
            work.wait()
        errors.append(error.value)
    assert len(set(map(id, errors))) == 3
    assert log == ["a starts"]
    queue.close()


def test_one_exchange_is_started_at_once_and_finished_in_wait() -> None:
    log: list[str] = []
    exchange = Exchange()
    work = run(_steps(log, "a", exchange), ANY, async_op=True, queue=None)
    assert work is not None
    assert log == ["a starts"]
    assert not work.is_completed()
    exchange.ended.set()
    assert work.is_completed()
    work.wait()
    work.wait()
    assert log == ["a starts", "a ends"]


def test_a_synchronous_call_runs_behind_what_is_queued() -> None:
    queue, log, exchange = WorkQueue(), [], Exchange()
    first = _submitted(queue, _steps(log, "a", exchange))
    threading.Timer(0.05, exchange.ended.set).start()
    assert run(_steps(log, "b"), ANY, async_op=False, queue=queue) is None
    assert log == ["a starts", "a ends", "b starts", "b ends"]
    first.wait()
    assert queue.is_idle
    queue.close()


def test_errors_are_raised_by_every_wait_and_do_not_stop_the_thread() -> None:
    queue, log = WorkQueue(), []
    broken = Exchange(RuntimeError("connection lost"))
    broken.ended.set()
    work, after = _submitted(queue, _steps(log, "a", broken)), _submitted(queue, _steps(log, "b"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection lost"):
            work.wait()
    after.wait()
    queue.close()
    inline = run(_steps(log, "c", broken), ANY, async_op=True, queue=None)
    assert inline is not None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection lost"):
            inline.wait()
    assert log == ["a starts", "b starts", "b ends", "c starts"]


def test_waiting_inside_the_thread_for_a_later_collective_is_refused() -> None:
    queue = WorkQueue()
    later: list[Work] = []
    ready = threading.Event()

    def waits_for_itself() -> Steps:
        assert ready.wait(20)
        later[0].wait()
        yield None

    work = _submitted(queue, waits_for_itself())
    later.append(_submitted(queue, _steps([], "later")))
    ready.set()
    with pytest.raises(StateError, match="cannot wait for a later one"):
        work.wait()
    later[0].wait()
    queue.close()


def test_a_closed_topology_refuses_calls() -> None:
    topology = Topology.single()
    topology.close()
    topology.close()
    with pytest.raises(StateError, match="closed"):
        zcomm.all_gather_single(torch.zeros(2), torch.zeros(2), topology)
    with pytest.raises(StateError, match="closed"):
        zcomm.control.agree_max(torch.zeros(2, dtype=torch.int64), topology)


def test_close_finishes_what_is_queued() -> None:
    queue, log, exchange = WorkQueue(), [], Exchange()
    work = _submitted(queue, _steps(log, "a", exchange))
    threading.Timer(0.05, exchange.ended.set).start()
    queue.close()
    assert work.is_completed()
    assert log == ["a starts", "a ends"]


def test_the_thread_ends_with_a_forgotten_queue_and_keeps_no_tensors() -> None:
    queue = WorkQueue()
    tensor = torch.zeros(3)
    forgotten = weakref.ref(tensor)

    def holds(held: torch.Tensor) -> Steps:
        yield None
        held.add_(1)

    _submitted(queue, holds(tensor)).wait()
    assert queue.is_idle
    del tensor
    gc.collect()
    assert forgotten() is None
    thread = queue._thread
    assert thread is not None
    del queue
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_the_thread_does_not_keep_the_process_alive() -> None:
    script = (
        "from zcomm._transport.work import WorkQueue\nimport threading\nqueue = WorkQueue()\n"
        "def steps():\n    threading.Event().wait()\n    yield None\nqueue.submit(steps())\nprint('end')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "end\n"


def _check_groups_can_be_made_again(rank: int) -> None:
    for _ in range(3):
        with_two_hops = Topology(ranks_per_node=2)
        twin = with_two_hops.clone()
        for t in (with_two_hops, twin):
            full = torch.empty(4)
            work = zcomm.all_gather_single(full, torch.full((1,), float(rank)), t, async_op=True)
            assert work is not None
            work.wait()
            assert full.tolist() == [0, 1, 2, 3]
        timeout = torch.distributed.group.WORLD._get_backend(ANY.device).options._timeout
        for hop in (twin.world, twin.intra, twin.inter):
            assert hop.group.group._get_backend(ANY.device).options._timeout == timeout
        twin.close()
        with_two_hops.close()


def test_groups_can_be_made_again_and_have_their_parents_timeout() -> None:
    run_ranks(4, _check_groups_can_be_made_again)


def _check_part_of_the_job(rank: int) -> None:
    halves = [torch.distributed.new_group([0, 2, 3]), torch.distributed.new_group([1])]
    if rank == 1:
        with pytest.raises(zcomm.TopologyError, match="not in the group"):
            Topology(ranks_per_node=1, group=halves[0])
        t = Topology(ranks_per_node=1, group=halves[1])
        assert (t.world_size, t.rank) == (1, 0)
    # torch.distributed names the groups of a part by how many groups a rank is in: more or fewer, alike or not.
    before = ["nothing", "a group of two", "a group gone", "nothing"]
    mine = []
    for event in before:
        if event == "a group of two":
            mine = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([0, 1])]
        elif event == "a group gone" and rank in (0, 1):
            for group in mine:
                torch.distributed.destroy_process_group(group)
        if rank == 1:
            continue
        t = Topology(ranks_per_node=3, group=halves[0])
        total = torch.full((5,), float(rank))
        zcomm.all_reduce(total, group=t)
        assert total.tolist() == [5.0] * 5
        t.close()


def test_a_topology_over_part_of_the_job() -> None:
    run_ranks(4, _check_part_of_the_job)


def _check_control_in_order(rank: int) -> None:
    """On one node control exchanges and collectives share a group: neither may overtake the other."""
    t = Topology(ranks_per_node=2)
    for i in range(20):
        x = torch.full((1000,), float(rank + i))
        work = zcomm.all_reduce(x, group=t, async_op=True)
        if rank == 0 and i % 3 == 0:
            time.sleep(0.002)
        assert zcomm.control.agree_max(torch.tensor([rank + i]), t).tolist() == [i + 1]
        assert work is not None
        work.wait()
        assert torch.equal(x, torch.full((1000,), 2.0 * i + 1))
    t.close()


def test_control_keeps_the_order_of_calls() -> None:
    run_ranks(2, _check_control_in_order)


def _check_groups_in_order(rank: int) -> None:
    """The ranks use the store before they create a group: the group they have may be in use by the thread."""
    t = Topology(ranks_per_node=2)
    for i, make in enumerate((lambda: t.background, lambda: t.clone().close())):
        x = torch.full((1000,), float(rank + i))
        work = zcomm.all_reduce(x, group=t, async_op=True)
        if rank == 0:
            time.sleep(0.05)
        make()
        assert work is not None
        work.wait()
        assert torch.equal(x, torch.full((1000,), 2.0 * i + 1))
    t.close()


def test_groups_are_made_in_the_order_of_calls() -> None:
    run_ranks(2, _check_groups_in_order)


def _check_dropped_gathers(rank: int) -> None:
    numel = 2**17  # large enough for sends and receives of our own
    for value in range(3):
        zcomm.all_gather_single(torch.empty(2 * numel), torch.full((numel,), 10.0 * value), async_op=True)
    output = torch.empty(2 * numel)
    zcomm.all_gather_single(output, torch.full((numel,), float(rank)))
    assert output[:numel].eq(0).all()
    assert output[numel:].eq(1).all()


def test_a_gather_that_nobody_waits_for_does_not_meet_the_next() -> None:
    run_ranks(2, _check_dropped_gathers)


def test_what_exchanges_nothing_is_completed_at_once() -> None:
    work = run(nothing(), ANY, async_op=True, queue=None)
    assert work is not None
    assert work.is_completed()
    assert work.completes_within(0)
    sums = zcomm.NodeSums(zcomm.Topology.single(), 8, ("none", "none"))
    added = sums.add(torch.ones(8), async_op=True)
    assert added is not None
    assert added.is_completed(), "as on every node of one rank"


@pytest.mark.parametrize("num_exchanges", [1, 2], ids=["driven by the caller", "by the thread"])
def test_completes_within_a_time(num_exchanges: int) -> None:
    exchange, queue = Exchange(), WorkQueue()
    work = run(_steps([], "a", exchange), ANY, async_op=True, queue=queue, num_exchanges=num_exchanges)
    assert work is not None
    assert not work.completes_within(0.01)
    threading.Timer(0.05, exchange.ended.set).start()
    assert work.completes_within(20)
    work.wait()
    queue.close()
