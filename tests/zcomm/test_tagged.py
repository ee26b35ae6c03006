"""Exchanges by tagged sends, or through copies: what a thread starts, its errors, and when they complete."""

# covers zcomm/_base/pending.py zcomm/_transport/call_context.py zcomm/_transport/tagged.py

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zcomm import all_gather_single, reduce_scatter_single
from zcomm._transport import backend
from zcomm._transport.call_context import Context, current_context, use_context
from zcomm._transport.tagged import BACKGROUND_NBYTES, TaggedExchange, exchange
from zcomm._transport.work import Steps, run

SMALL, LARGE = torch.ones(4), torch.ones(BACKGROUND_NBYTES)


class Group:
    """A process group that records its sends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.threads: list[str] = []
        self._error = error

    def send(self, *_: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        if self._error is not None:
            raise self._error
        return Ended()

    recv = send

    def _get_backend(self, _: torch.device) -> Group:
        return self


class Ended:
    """A completed send."""

    def wait(self) -> None:
        pass


def _exchange(group: Any, tensor: torch.Tensor, *, overlaps: bool = True) -> TaggedExchange:
    with use_context(Context(overlaps=overlaps)):
        return exchange(group, 4, [(1, tensor.clone())], [(1, tensor)])


@pytest.mark.parametrize(("tensor", "overlaps"), [(SMALL, True), (LARGE, True), (LARGE, False)])
def test_who_starts(tensor: torch.Tensor, overlaps: bool) -> None:  # noqa: FBT001
    group = Group()
    pending = _exchange(group, tensor, overlaps=overlaps)
    pending.wait()
    is_apart = tensor is LARGE and overlaps
    assert group.threads == ["zcomm-send" if is_apart else threading.current_thread().name] * 2
    assert pending.is_completed()


def test_only_what_is_not_waited_for_at_once_goes_on() -> None:
    seen = []

    def steps() -> Steps:
        seen.append(current_context().overlaps)
        yield TaggedExchange([])
        seen.append(current_context().overlaps)

    for async_op in (True, False):
        work = run(steps(), SMALL, async_op=async_op, queue=None)
        if work is not None:
            work.wait()
    assert seen == [True, False, False, False]


def test_what_fails_to_start_fails_in_wait_each_time_and_stops_nothing_else() -> None:
    pending = _exchange(Group(RuntimeError("no such peer")), LARGE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such peer"):
            pending.wait()
    later = Group()
    _exchange(later, LARGE).wait()
    assert later.threads == ["zcomm-send"] * 2


def _check_both_ways(rank: int) -> None:
    sent = [torch.full((BACKGROUND_NBYTES,), float(10 * rank + i)) for i in range(3)]
    received = [torch.empty(BACKGROUND_NBYTES) for _ in sent]
    order = range(3) if rank == 0 else reversed(range(3))  # tags bring together what belongs together
    group = dist.group.WORLD
    assert group is not None
    with use_context(Context(overlaps=True)):
        pending = {i: exchange(group, 4 * (i + 1), [(1 - rank, received[i])], [(1 - rank, sent[i])]) for i in order}
    until = time.monotonic() + 60
    while not all(one.is_completed() for one in pending.values()):
        assert time.monotonic() < until, "an exchange that was asked for has not ended"
        time.sleep(0.001)
    for i, values in enumerate(received):
        assert values.eq(10 * (1 - rank) + i).all()
    for one in pending.values():
        one.wait()


def test_large_exchanges_of_another_order_on_each_rank_end_and_are_known_to() -> None:
    run_ranks(2, _check_both_ways)


class _Lost:
    """A receive from a dead rank."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_an_exchange_that_failed_has_ended() -> None:
    """Otherwise a rank that polls, as with many reductions in flight, would poll until its timeout."""
    pending = TaggedExchange([_Lost()])
    end = time.monotonic() + 30
    while not pending.is_completed():
        assert time.monotonic() < end
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            pending.wait()


def test_who_holds_what_has_ended_does_not_use_its_tensors() -> None:
    """Otherwise the buffer would count as used a moment too long, and another one would be allocated."""
    for tensor in (SMALL, LARGE):
        sent = tensor.clone()
        used = weakref.ref(sent)
        with use_context(Context(overlaps=True)):
            pending = exchange(cast(Any, Group()), 4, [], [(1, sent)])
        del sent
        assert pending.ends_within(30)
        assert used() is None


def _check_through_copies(rank: int) -> None:
    """As for tensors on a device that the backend does not support: the result is copied back when it is complete."""
    usual, shard = backend.device_of, torch.full((1000,), rank + 1.0)
    full, half = torch.zeros(2000), torch.zeros(500)
    backend.device_of = lambda *_: torch.device("cpu", 0)  # another device than "cpu"
    try:
        time.sleep(0.2 * rank)  # the first rank has started long before
        all_gather_single(full, shard)
        time.sleep(0.2 * rank)
        reduce_scatter_single(half, shard, "sum")
    finally:
        backend.device_of = usual
    assert torch.equal(full, torch.tensor([1.0, 2.0]).repeat_interleave(1000))
    assert bool((half == 3).all())


def test_what_goes_through_copies_is_there_when_the_call_returns() -> None:
    run_ranks(2, _check_through_copies)


def test_an_exchange_that_is_dropped_is_kept_until_it_is_complete() -> None:
    """Not waited for by who drops it, which may hold a lock that a peer's thread needs."""
    may_end = threading.Event()

    class Unfinished(Group):
        def send(self, *_: Any) -> Any:
            class Work:
                def wait(self) -> None:
                    may_end.wait(30)

            return Work()

        recv = send

    tensor = torch.ones(4)
    kept = weakref.ref(tensor)
    started = time.monotonic()
    pending = exchange(cast("Any", Unfinished()), 4, [(1, tensor)], [])
    del pending, tensor
    assert time.monotonic() - started < 10
    assert kept() is not None
    _exchange(Group(), SMALL).wait()  # hands it to the thread
    may_end.set()
    stop = time.monotonic() + 30
    while kept() is not None and time.monotonic() < stop:
        time.sleep(0.01)
    assert kept() is None
